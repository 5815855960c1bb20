"""AsyncClient: a Penstock server as methods to `await`. The twin of client.py."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from penstock_client.assembler import C, StreamAssembler
from penstock_client.errors import PenstockError
from penstock_client.exchange import JSONObject, Reply, Request
from penstock_client.failures import checked
from penstock_client.parsing import (
    only_model,
    parse_chat_chunk,
    parse_chat_completion,
    parse_completion,
    parse_completion_chunk,
    parse_health,
    parse_models,
)
from penstock_client.requests import (
    HEALTH,
    MODELS,
    Messages,
    Prompt,
    chat_request,
    completion_request,
)
from penstock_client.results import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Health,
    Model,
)
from penstock_client.retries import RetryPolicy
from penstock_client.settings import DEFAULT_CONNECT_TIMEOUT_S, DEFAULT_TIMEOUT_S, Settings
from penstock_client.streams import AsyncStream
from penstock_client.transport import AsyncStreamReply, AsyncTransport

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from penstock_client.params import ChatParams, CompletionParams

T = TypeVar("T")


class AsyncClient:
    """The same as Client, for asyncio; see there for the arguments and the errors.

    One instance serves any number of tasks of one event loop, at once:

        async with AsyncClient() as client:
            answers = await asyncio.gather(*(client.complete(prompt) for prompt in prompts))

    Cancelling a task closes its connection, by which the server learns to stop.
    sleep: what waits, in seconds, before a retry.
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
        settings = Settings.resolve(base_url, api_key, timeout, connect_timeout, os.environ)
        self._retry_policy = RetryPolicy(max_retries)
        self._transport = AsyncTransport(settings)
        self._model = model
        self._sleep = sleep

    async def complete(self, prompt: Prompt, **params: Unpack[CompletionParams]) -> Completion:
        """Continue `prompt`: a text, texts, ids, or lists of them. Keywords: CompletionParams."""
        request = completion_request(prompt, params)
        return parse_completion(await self._send(request))

    async def chat(self, messages: Messages, **params: Unpack[ChatParams]) -> ChatCompletion:
        """Answer `messages`: what the user says, or a whole conversation. Keywords: ChatParams."""
        request = chat_request(messages, params)
        return parse_chat_completion(await self._send(request))

    def stream_complete(
        self, prompt: Prompt, **params: Unpack[CompletionParams]
    ) -> AsyncStream[CompletionChunk]:
        """Like `complete`, in chunks as they are made."""
        request = completion_request(prompt, params, stream=True)
        return self._stream(request, parse_completion_chunk)

    def stream_chat(
        self, messages: Messages, **params: Unpack[ChatParams]
    ) -> AsyncStream[ChatCompletionChunk]:
        """Like `chat`, in chunks as they are made."""
        request = chat_request(messages, params, stream=True)
        return self._stream(request, parse_chat_chunk)

    async def models(self) -> tuple[Model, ...]:
        """The models that the server offers."""
        return parse_models(await self._send(MODELS))

    async def health(self) -> Health:
        """Whether the server can answer now; a 503 is an answer, not an error. Never retries."""
        reply = await self._transport.send(HEALTH)
        return parse_health(reply if reply.status == 503 else checked(reply, time.time()))

    async def aclose(self) -> None:
        """Close all connections. Streams that are still open end."""
        await self._transport.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _send(self, request: Request) -> Reply:
        ready = await self._with_model(request)

        async def attempt() -> Reply:
            return checked(await self._transport.send(ready), time.time())

        return await self._retrying(attempt)

    def _stream(self, request: Request, parse_chunk: Callable[[JSONObject], C]) -> AsyncStream[C]:
        async def open_reply() -> AsyncStreamReply:
            ready = await self._with_model(request)
            return await self._retrying(lambda: self._transport.open(ready))

        return AsyncStream(open_reply, StreamAssembler(parse_chunk))

    async def _with_model(self, request: Request) -> Request:
        if not request.needs_model:
            return request
        if self._model is None:
            self._model = only_model(await self.models())
        return request.with_model(self._model)

    async def _retrying(self, attempt: Callable[[], Awaitable[T]]) -> T:
        num_retries = 0
        while True:
            try:
                return await attempt()
            except PenstockError as error:
                delay_s = self._retry_policy.delay_s(num_retries, error, random.random())
                if delay_s is None:
                    raise
            await self._sleep(delay_s)
            num_retries += 1
