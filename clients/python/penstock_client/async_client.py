"""AsyncClient: a Penstock server as methods to `await`. session.py does the work."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from penstock_client.assembler import CHAT, COMPLETION, AnswerFormat, C, R
from penstock_client.batch import AsyncBatch, BatchOptions
from penstock_client.chunks import ChatCompletionChunk, CompletionChunk
from penstock_client.exchange import Request
from penstock_client.filled import FillChunk, Filled
from penstock_client.pooled import Embeddings, Ranking, Scores
from penstock_client.progress import ProgressReport
from penstock_client.requests import Messages, Prompt, chat_request, completion_request
from penstock_client.responses import Response, ResponseChunk
from penstock_client.results import ChatCompletion, Completion
from penstock_client.retries import RetryPolicy
from penstock_client.server_info import Health, Model, Tokens
from penstock_client.session import Session
from penstock_client.settings import DEFAULT_CONNECT_TIMEOUT_S, DEFAULT_TIMEOUT_S, Settings
from penstock_client.streams import AsyncStream
from penstock_client.transport import AsyncHTTPClient, AsyncTransport

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from penstock_client.params import (
        ChatParams,
        CompletionParams,
        EmbedParams,
        FillParams,
        RerankParams,
        ResponseParams,
        ScoreParams,
        TokenizeParams,
    )

P = TypeVar("P")


class AsyncClient:
    """Client for asyncio. See Client for the arguments, the methods and the errors.

    One instance serves any number of tasks of one event loop at once. Cancelling a task closes the
    task's connection, and the server stops. Close the client, or use `async with`:

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
        default_headers: Mapping[str, str] | None = None,
        ca_bundle: str | os.PathLike[str] | None = None,
        http_client: AsyncHTTPClient | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """http_client: an httpx2.AsyncClient. It is not closed with this client."""
        settings = Settings.resolve(
            base_url, api_key, timeout, connect_timeout, os.environ, default_headers, ca_bundle
        )
        policy = RetryPolicy(max_retries)
        self._transport = AsyncTransport(settings, http_client)
        self._session = Session(settings, policy, model, self._transport, sleep)

    @property
    def base_url(self) -> str:
        """The server's address, without a slash or /v1 at its end."""
        return self._session.settings.base_url

    def __repr__(self) -> str:
        return f"AsyncClient({self._session.settings.shown_url!r}, model={self._session.model!r})"

    async def complete(self, prompt: Prompt, **params: Unpack[CompletionParams]) -> Completion:
        """Continue `prompt`: a text, texts, ids, or lists of them. Keywords: CompletionParams."""
        return await self._session.complete(prompt, params)

    async def chat(self, messages: Messages, **params: Unpack[ChatParams]) -> ChatCompletion:
        """Answer `messages`: what the user says, or a whole conversation. Keywords: ChatParams."""
        return await self._session.chat(messages, params)

    async def fill(self, prompt: str, **params: Unpack[FillParams]) -> Filled:
        """Fill in the blanks of `prompt`: <span> or ____. Keywords: FillParams."""
        return await self._session.fill(prompt, params)

    async def respond(self, input: Messages, **params: Unpack[ResponseParams]) -> Response:
        """Answer `input` on OpenAI's newer route. Keywords: ResponseParams."""
        return await self._session.respond(input, params)

    async def embed(self, input: Prompt, **params: Unpack[EmbedParams]) -> Embeddings:
        """The vectors of texts. Keywords: EmbedParams."""
        return await self._session.embed(input, params)

    async def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], **params: Unpack[ScoreParams]
    ) -> Scores:
        """How well texts fit; see Client.score."""
        return await self._session.score(text_1, text_2, params)

    async def rerank(self, query: str, documents: Sequence[str], **params: Unpack[RerankParams]) -> Ranking:
        """The documents by how well they fit the query, best first. Keywords: RerankParams."""
        return await self._session.rerank(query, documents, params)

    def stream_complete(
        self, prompt: Prompt, **params: Unpack[CompletionParams]
    ) -> AsyncStream[CompletionChunk, Completion]:
        """Like `complete`, in chunks as they are made."""
        return self._session.stream_complete(prompt, params)

    def stream_chat(
        self, messages: Messages, **params: Unpack[ChatParams]
    ) -> AsyncStream[ChatCompletionChunk, ChatCompletion]:
        """Like `chat`, in chunks as they are made."""
        return self._session.stream_chat(messages, params)

    def stream_respond(
        self, input: Messages, **params: Unpack[ResponseParams]
    ) -> AsyncStream[ResponseChunk, Response]:
        """Like `respond`, in events as they come."""
        return self._session.stream_respond(input, params)

    def stream_fill(self, prompt: str, **params: Unpack[FillParams]) -> AsyncStream[FillChunk, Filled]:
        """Like `fill`, in chunks as they are made."""
        return self._session.stream_fill(prompt, params)

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
        return await self._session.models()

    async def tokenize(self, text: Messages, **params: Unpack[TokenizeParams]) -> Tokens:
        """Token ids of a text or, if it is a list, of a chat as the model reads it."""
        return await self._session.tokenize(text, params)

    async def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """The text of token ids."""
        return await self._session.detokenize(token_ids, model)

    async def health(self) -> Health:
        """Whether the server can answer now. A 503 is an answer, not an error. No retries."""
        return await self._session.health()

    async def wait_until_ready(
        self,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        on_progress: Callable[[Health], None] | None = None,
    ) -> Health:
        """Wait for a server that starts or loads its model; see Client.wait_until_ready."""
        return await self._session.wait_until_ready(timeout, on_progress)

    async def aclose(self) -> None:
        """Close all connections. Streams that are still open end."""
        await self._transport.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def _batch(
        self,
        prompts: Iterable[P],
        request_of: Callable[..., Request],
        answer_format: AnswerFormat[C, R],
        options: BatchOptions,
        params: Mapping[str, object],
    ) -> AsyncBatch[P, R]:
        # Answers are read as streams: keep-alives tell a slow server from a dead one. Streams lack
        # one field, prompt_logprobs.
        can_stream = params.get("prompt_logprobs") is None
        # The batch has more patience than a single request; its own retries are enough.
        once = RetryPolicy(max_retries=0)

        async def ask(prompt: P, on_answer: Callable[[], None]) -> R:
            request = request_of(prompt, params, stream=can_stream)
            if not can_stream:
                answer = answer_format.parse(await self._session.send(request, once))
                on_answer()
                return answer
            async with self._session.stream(request, answer_format, once) as stream:
                on_answer()
                return await stream.result()

        return AsyncBatch(prompts, ask, options, self._session.sleep)
