"""AsyncClient: a Penstock server as methods to `await`. The twin of client.py."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from penstock_client.assembler import CHAT, COMPLETION, AnswerFormat, C, R, StreamAssembler
from penstock_client.batch import AsyncBatch, BatchOptions
from penstock_client.chunks import ChatCompletionChunk, CompletionChunk
from penstock_client.errors import PenstockError
from penstock_client.exchange import Reply, Request
from penstock_client.failures import checked
from penstock_client.progress import ProgressReport
from penstock_client.readiness import POLL_INTERVAL_S, Readiness
from penstock_client.requests import (
    HEALTH,
    MODELS,
    Messages,
    Prompt,
    chat_request,
    completion_request,
    detokenize_request,
    tokenize_request,
)
from penstock_client.results import ChatCompletion, Completion
from penstock_client.retries import Attempts, RetryPolicy
from penstock_client.server_info import (
    Health,
    Model,
    Tokens,
    only_model,
    parse_health,
    parse_models,
    parse_text_of_tokens,
    parse_tokens,
)
from penstock_client.settings import DEFAULT_CONNECT_TIMEOUT_S, DEFAULT_TIMEOUT_S, Settings
from penstock_client.streams import AsyncStream
from penstock_client.transport import AsyncStreamReply, AsyncTransport

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from penstock_client.params import ChatParams, CompletionParams, TokenizeParams

P = TypeVar("P")
T = TypeVar("T")


class AsyncClient:
    """The same as Client, for asyncio; see there for the arguments, the methods and the errors.

    One instance serves any number of tasks of one event loop, at once. Cancelling a task closes
    its connection, by which the server learns to stop. Close it, or use `async with`:

    >>> async def main():
    ...     async with AsyncClient() as client:
    ...         answer = await client.chat("Who are you?", max_tokens=20)
    ...         async with client.batch(["One", "Two"], max_tokens=4) as results:
    ...             return answer.finish_reason, [result.index async for result in results]
    >>> asyncio.run(main())
    ('length', [0, 1])
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        model: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        connect_timeout: float | None = DEFAULT_CONNECT_TIMEOUT_S,
        max_retries: int = 2,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._settings = Settings.resolve(base_url, api_key, timeout, connect_timeout, os.environ)
        self._retry_policy = RetryPolicy(max_retries)
        self._transport = AsyncTransport(self._settings)
        self._model = model
        self._sleep = sleep

    async def complete(self, prompt: Prompt, **params: Unpack[CompletionParams]) -> Completion:
        """Continue `prompt`: a text, texts, ids, or lists of them. Keywords: CompletionParams."""
        return COMPLETION.parse(await self._send(completion_request(prompt, params)))

    async def chat(self, messages: Messages, **params: Unpack[ChatParams]) -> ChatCompletion:
        """Answer `messages`: what the user says, or a whole conversation. Keywords: ChatParams."""
        return CHAT.parse(await self._send(chat_request(messages, params)))

    def stream_complete(
        self, prompt: Prompt, **params: Unpack[CompletionParams]
    ) -> AsyncStream[CompletionChunk, Completion]:
        """Like `complete`, in chunks as they are made."""
        return self._stream(completion_request(prompt, params, stream=True), COMPLETION)

    def stream_chat(
        self, messages: Messages, **params: Unpack[ChatParams]
    ) -> AsyncStream[ChatCompletionChunk, ChatCompletion]:
        """Like `chat`, in chunks as they are made."""
        return self._stream(chat_request(messages, params, stream=True), CHAT)

    def batch(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int = 8,
        ordered: bool = True,
        progress: ProgressReport = False,
        patience: float | None = DEFAULT_TIMEOUT_S,
        **params: Unpack[CompletionParams],
    ) -> AsyncBatch[Prompt, Completion]:
        """`complete` for each of many prompts, `concurrency` at a time; see Client.batch."""
        options = BatchOptions(concurrency, ordered, progress, patience)
        completion_request("", params, method="batch")
        return self._batch(prompts, completion_request, COMPLETION, options, params)

    def batch_chat(
        self,
        conversations: Iterable[Messages],
        *,
        concurrency: int = 8,
        ordered: bool = True,
        progress: ProgressReport = False,
        patience: float | None = DEFAULT_TIMEOUT_S,
        **params: Unpack[ChatParams],
    ) -> AsyncBatch[Messages, ChatCompletion]:
        """`chat` for each of many conversations; see Client.batch."""
        options = BatchOptions(concurrency, ordered, progress, patience)
        chat_request("", params, method="batch_chat")
        return self._batch(conversations, chat_request, CHAT, options, params)

    async def models(self) -> tuple[Model, ...]:
        """The models that the server offers."""
        return parse_models(await self._send(MODELS))

    async def tokenize(self, text: Messages, **params: Unpack[TokenizeParams]) -> Tokens:
        """Token ids of a text or, if it is a list, of a chat as the model reads it."""
        return parse_tokens(await self._send(tokenize_request(text, params)))

    async def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """The text of token ids."""
        return parse_text_of_tokens(await self._send(detokenize_request(token_ids, model)))

    async def health(self) -> Health:
        """Whether the server can answer now; a 503 is an answer, not an error. Never retries."""
        reply = await self._transport.send(HEALTH.with_timeout(self._settings.probe_timeout_s))
        return parse_health(reply if reply.status == 503 else checked(reply, time.time()))

    async def wait_until_ready(
        self,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        on_progress: Callable[[Health], None] | None = None,
    ) -> Health:
        """Wait for a server that starts or loads its model; see Client.wait_until_ready."""
        readiness = Readiness(timeout, on_progress, time.monotonic())
        while (health := readiness.judge(await self._probe(), time.monotonic())) is None:
            await self._sleep(POLL_INTERVAL_S)
        return health

    async def aclose(self) -> None:
        """Close all connections. Streams that are still open end."""
        await self._transport.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def _probe(self) -> Health | PenstockError:
        try:
            return await self.health()
        except PenstockError as error:
            return error

    async def _send(self, request: Request, policy: RetryPolicy | None = None) -> Reply:
        ready, attempts = await self._with_model(request), Attempts(policy or self._retry_policy)

        async def attempt() -> Reply:
            return checked(await self._transport.send(ready), time.time())

        return await self._retrying(attempts, attempt)

    def _stream(
        self,
        request: Request,
        answer_format: AnswerFormat[C, R],
        policy: RetryPolicy | None = None,
    ) -> AsyncStream[C, R]:
        attempts = Attempts(policy or self._retry_policy)

        async def open_reply() -> AsyncStreamReply:
            ready = await self._with_model(request)
            return await self._retrying(attempts, lambda: self._transport.open(ready))

        async def wait_to_retry(error: PenstockError) -> bool:
            return await self._wait_to_retry(attempts, error)

        return AsyncStream(open_reply, StreamAssembler(answer_format), wait_to_retry)

    def _batch(
        self,
        prompts: Iterable[P],
        request_of: Callable[..., Request],
        answer_format: AnswerFormat[C, R],
        options: BatchOptions,
        params: Mapping[str, object],
    ) -> AsyncBatch[P, R]:
        # Read as streams, whose keep-alives tell a slow server from a dead one. The one field
        # that streams don't have:
        can_stream = params.get("prompt_logprobs") is None
        # The batch has more patience than a single request; its own retries are enough.
        once = RetryPolicy(max_retries=0)

        async def ask(prompt: P, on_answer: Callable[[], None]) -> R:
            request = request_of(prompt, params, stream=can_stream)
            if not can_stream:
                answer = answer_format.parse(await self._send(request, once))
                on_answer()
                return answer
            async with self._stream(request, answer_format, once) as stream:
                on_answer()
                return await stream.result()

        return AsyncBatch(prompts, ask, options, self._sleep)

    async def _with_model(self, request: Request) -> Request:
        if not request.needs_model:
            return request
        if self._model is None:
            self._model = only_model(await self.models())
        return request.with_model(self._model)

    async def _retrying(self, attempts: Attempts, attempt: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await attempt()
            except PenstockError as error:
                if not await self._wait_to_retry(attempts, error):
                    raise

    async def _wait_to_retry(self, attempts: Attempts, error: PenstockError) -> bool:
        delay_s = attempts.delay_s(error, random.random())
        if delay_s is None:
            return False
        await self._sleep(delay_s)
        return True
