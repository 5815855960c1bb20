"""Session: the work of both clients, written once as coroutines.

AsyncClient awaits the coroutines. Client runs each of them to its end at once, with a transport that blocks
(at_once.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from penstock_client.assembler import CHAT, COMPLETION, FILL, RESPONSE, AnswerFormat, C, R, StreamAssembler
from penstock_client.chunks import ChatCompletionChunk, CompletionChunk
from penstock_client.errors import PenstockError
from penstock_client.exchange import Reply, Request
from penstock_client.failures import checked
from penstock_client.filled import FillChunk, Filled
from penstock_client.pooled import (
    Embeddings,
    Ranking,
    Scores,
    parse_embeddings,
    parse_ranking,
    parse_scores,
)
from penstock_client.readiness import POLL_INTERVAL_S, Readiness
from penstock_client.requests import (
    HEALTH,
    MODELS,
    Messages,
    Prompt,
    chat_request,
    completion_request,
    detokenize_request,
    embed_request,
    fill_request,
    rerank_request,
    response_request,
    score_request,
    tokenize_request,
)
from penstock_client.responses import Response, ResponseChunk
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
from penstock_client.settings import Settings
from penstock_client.streams import AsyncStream, OpenReply

T = TypeVar("T")


class Sender(Protocol):
    """A transport for asyncio, or one that can be awaited and blocks."""

    async def send(self, request: Request) -> Reply: ...

    async def open(self, request: Request) -> OpenReply: ...


class Session:
    """The session of one client. Client describes the methods, their arguments and errors."""

    def __init__(
        self,
        settings: Settings,
        policy: RetryPolicy,
        model: str | None,
        transport: Sender,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self.settings = settings
        self.policy = policy
        self.model = model
        self._transport = transport
        self.sleep = sleep

    async def complete(self, prompt: Prompt, params: Mapping[str, object]) -> Completion:
        return COMPLETION.parse(await self.send(completion_request(prompt, params)))

    async def chat(self, messages: Messages, params: Mapping[str, object]) -> ChatCompletion:
        return CHAT.parse(await self.send(chat_request(messages, params)))

    async def fill(self, prompt: str, params: Mapping[str, object]) -> Filled:
        return FILL.parse(await self.send(fill_request(prompt, params)))

    def stream_complete(
        self, prompt: Prompt, params: Mapping[str, object]
    ) -> AsyncStream[CompletionChunk, Completion]:
        return self.stream(completion_request(prompt, params, stream=True), COMPLETION)

    def stream_chat(
        self, messages: Messages, params: Mapping[str, object]
    ) -> AsyncStream[ChatCompletionChunk, ChatCompletion]:
        return self.stream(chat_request(messages, params, stream=True), CHAT)

    def stream_fill(self, prompt: str, params: Mapping[str, object]) -> AsyncStream[FillChunk, Filled]:
        return self.stream(fill_request(prompt, params, stream=True), FILL)

    async def respond(self, input: Messages, params: Mapping[str, object]) -> Response:
        return RESPONSE.parse(await self.send(response_request(input, params)))

    def stream_respond(
        self, input: Messages, params: Mapping[str, object]
    ) -> AsyncStream[ResponseChunk, Response]:
        return self.stream(response_request(input, params, stream=True), RESPONSE)

    async def embed(self, input: Prompt, params: Mapping[str, object]) -> Embeddings:
        return parse_embeddings(await self.send(embed_request(input, params)))

    async def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], params: Mapping[str, object]
    ) -> Scores:
        return parse_scores(await self.send(score_request(text_1, text_2, params)))

    async def rerank(self, query: str, documents: Sequence[str], params: Mapping[str, object]) -> Ranking:
        return parse_ranking(await self.send(rerank_request(query, documents, params)))

    async def models(self) -> tuple[Model, ...]:
        return parse_models(await self.send(MODELS))

    async def tokenize(self, text: Messages, params: Mapping[str, object]) -> Tokens:
        return parse_tokens(await self.send(tokenize_request(text, params)))

    async def detokenize(self, token_ids: Sequence[int], model: str | None) -> str:
        return parse_text_of_tokens(await self.send(detokenize_request(token_ids, model)))

    async def health(self) -> Health:
        reply = await self._transport.send(HEALTH.with_timeout(self.settings.probe_timeout_s))
        return parse_health(reply if reply.status == 503 else checked(reply, time.time()))

    async def wait_until_ready(
        self, timeout: float | None, on_progress: Callable[[Health], None] | None
    ) -> Health:
        readiness = Readiness(timeout, on_progress, time.monotonic())
        while (health := readiness.judge(await self._probe(), time.monotonic())) is None:
            await self.sleep(POLL_INTERVAL_S)
        return health

    async def send(self, request: Request, policy: RetryPolicy | None = None) -> Reply:
        """The answer to a request. A failed request is sent again as the policy says."""
        ready, attempts = await self._with_model(request), Attempts(policy or self.policy)

        async def attempt() -> Reply:
            return checked(await self._transport.send(ready), time.time())

        return await self._retrying(attempts, attempt)

    def stream(
        self, request: Request, answer_format: AnswerFormat[C, R], policy: RetryPolicy | None = None
    ) -> AsyncStream[C, R]:
        """A stream. Its request is sent when the stream is entered or read."""
        attempts = Attempts(policy or self.policy)

        async def open_reply() -> OpenReply:
            ready = await self._with_model(request)
            return await self._retrying(attempts, lambda: self._transport.open(ready))

        async def wait_to_retry(error: PenstockError) -> bool:
            return await self._wait_to_retry(attempts, error)

        return AsyncStream(open_reply, StreamAssembler(answer_format), wait_to_retry)

    async def _probe(self) -> Health | PenstockError:
        try:
            return await self.health()
        except PenstockError as error:
            return error

    async def _with_model(self, request: Request) -> Request:
        if not request.needs_model:
            return request
        if self.model is None:
            self.model = only_model(await self.models())
        return request.with_model(self.model)

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
        await self.sleep(delay_s)
        return True
