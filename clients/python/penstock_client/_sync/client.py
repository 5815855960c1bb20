# Made from _async/client.py by make_sync.py; edit that.
"""A Penstock server as methods. A session sends the requests; requests.py makes them of the arguments."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from penstock_client._sync.session import Session
from penstock_client._sync.streams import Stream
from penstock_client._sync.transport import Transport
from penstock_client.assembler import CHAT, COMPLETION, FILL, RESPONSE
from penstock_client.batch import Batch
from penstock_client.batch_options import BatchOptions, PromptRequests
from penstock_client.chunks import ChatCompletionChunk, CompletionChunk
from penstock_client.errors import PenstockError
from penstock_client.filled import FillChunk, Filled
from penstock_client.http_library import HTTPClient
from penstock_client.pooled import (
    Embeddings,
    Ranking,
    Scores,
    parse_embeddings,
    parse_ranking,
    parse_scores,
)
from penstock_client.progress import ProgressReport
from penstock_client.readiness import POLL_INTERVAL_S, Readiness
from penstock_client.requests import (
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
from penstock_client.retries import RetryPolicy
from penstock_client.server_info import Health, Model, Tokens, parse_text_of_tokens, parse_tokens
from penstock_client.settings import DEFAULT_CONNECT_TIMEOUT_S, DEFAULT_TIMEOUT_S, Settings, Sleep

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


class Client:
    """A client of one Penstock server, or of another server with OpenAI's API.

    Client waits for its answers. AsyncClient is for asyncio: its methods are awaited, and `async with`,
    `async for` and `aclose` replace `with`, `for` and `close` of the examples. Cancelling a task closes the
    task's connection, and the server stops.

    base_url: default PENSTOCK_BASE_URL, else http://127.0.0.1:8000.
    api_key: default PENSTOCK_API_KEY, else none is sent.
    model: the model of calls that name none; default the server's only model, looked up once.
    timeout: longest silence of the server, in seconds; None waits for ever. In a stream each chunk and
        each keep-alive ends a silence; an unstreamed answer is one long silence.
    connect_timeout: longest wait for a connection, in seconds.
    max_retries: how often a request is sent again if the server turned it away (429, 502, 503) or its
        connection failed, unless the caller got a part of the answer. Retry-After is honoured up to two
        minutes.
    default_headers: headers of every request; they win over the client's own.
    ca_bundle: a file of certificates (PEM), one of which has signed the server's, in place of those that the
        system trusts.
    http_client: an httpx2.Client, or for asyncio an httpx2.AsyncClient, that sends the requests, with its own
        proxies, certificates and limits. It is not closed with this client. Batches need the latter.
    sleep: the function that waits, in seconds, before a retry. Client's batches have a thread of their own
        and don't use it.

    Raises ValueError for unusable settings; methods raise the errors of errors.py.
    Several threads may use one Client at once, and any tasks of one event loop one AsyncClient. Close the
    client, or use `with`:

    >>> with Client() as client:
    ...     answer = client.chat("Who are you?", max_tokens=20)
    >>> answer.usage.completion_tokens <= 20
    True
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
        http_client: HTTPClient | None = None,
        sleep: Sleep = time.sleep,
    ) -> None:
        settings = Settings.resolve(
            base_url, api_key, timeout, connect_timeout, os.environ, default_headers, ca_bundle
        )
        policy, transport = RetryPolicy(max_retries), Transport(settings, http_client)
        self._session = Session(settings, policy, model, transport, sleep)

    @property
    def base_url(self) -> str:
        """The server's address, without a slash or /v1 at its end."""
        return self._session.settings.base_url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._session.settings.shown_url!r}, model={self._session.model!r})"

    def complete(self, prompt: Prompt, **params: Unpack[CompletionParams]) -> Completion:
        """Continue `prompt`: a text, texts, ids, or lists of them. Keywords: CompletionParams.

        >>> story = Client().complete("Once upon a time", max_tokens=5, n=2, seed=1)
        >>> [choice.finish_reason for choice in story.choices]
        ['length', 'length']
        """
        return COMPLETION.parse(self._session.send(completion_request(prompt, params)))

    def chat(self, messages: Messages, **params: Unpack[ChatParams]) -> ChatCompletion:
        """Answer `messages`: what the user says, or a whole conversation. Keywords: ChatParams.

        >>> digit = {"type": "integer", "minimum": 0, "maximum": 9}
        >>> Client().chat("How old is it?", response_format=digit).parse() in range(10)
        True
        """
        return CHAT.parse(self._session.send(chat_request(messages, params)))

    def fill(self, prompt: str, **params: Unpack[FillParams]) -> Filled:
        """Fill in the blanks of `prompt`: <span> or ____. Keywords: FillParams. Not every model can; for
        models that can't, the error is BadRequest.

        filled = client.fill("北京是____的首都。", temperature=0)
        filled.text, filled.spans[0].text
        """
        return FILL.parse(self._session.send(fill_request(prompt, params)))

    def respond(self, input: Messages, **params: Unpack[ResponseParams]) -> Response:
        """Answer `input` on OpenAI's newer route: what the user says, or a conversation with the items of
        earlier answers (`output`). Keywords: ResponseParams.

        >>> Client().respond("Who are you?", max_output_tokens=5, temperature=0).status
        'incomplete'
        """
        return RESPONSE.parse(self._session.send(response_request(input, params)))

    def embed(self, input: Prompt, **params: Unpack[EmbedParams]) -> Embeddings:
        """The vectors of texts, with a model that is made for them; other models are a BadRequest. Keywords:
        EmbedParams.

        found = client.embed(["one text", "another"])
        found.vectors[0]
        """
        return parse_embeddings(self._session.send(embed_request(input, params)))

    def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], **params: Unpack[ScoreParams]
    ) -> Scores:
        """How well texts fit: text_1 to each of text_2, or the first to the first and so on. Keywords:
        ScoreParams."""
        return parse_scores(self._session.send(score_request(text_1, text_2, params)))

    def rerank(self, query: str, documents: Sequence[str], **params: Unpack[RerankParams]) -> Ranking:
        """The documents by how well they fit the query, best first. Keywords: RerankParams.

        best = client.rerank("Where does it rain?", texts, top_n=3).results[0]
        best.index, best.score
        """
        return parse_ranking(self._session.send(rerank_request(query, documents, params)))

    def stream_complete(
        self, prompt: Prompt, **params: Unpack[CompletionParams]
    ) -> Stream[CompletionChunk, Completion]:
        """Like `complete`, in chunks as they are made.

        >>> with Client().stream_complete("Once", max_tokens=8) as stream:
        ...     texts = [chunk.text for chunk in stream]
        >>> "".join(texts) == stream.text
        True
        """
        return Stream(self._session, completion_request(prompt, params, stream=True), COMPLETION)

    def stream_chat(
        self, messages: Messages, **params: Unpack[ChatParams]
    ) -> Stream[ChatCompletionChunk, ChatCompletion]:
        """Like `chat`, in chunks as they are made. result() gives the whole answer with a stream's timeout:

        >>> answer = Client().stream_chat("Who are you?", max_tokens=20, temperature=0).result()
        >>> answer.text == Client().chat("Who are you?", max_tokens=20, temperature=0).text
        True
        """
        return Stream(self._session, chat_request(messages, params, stream=True), CHAT)

    def stream_respond(
        self, input: Messages, **params: Unpack[ResponseParams]
    ) -> Stream[ResponseChunk, Response]:
        """Like `respond`, in events as they come.

        >>> with Client().stream_respond("Who are you?", max_output_tokens=8, temperature=0) as stream:
        ...     texts = [chunk.text for chunk in stream]
        >>> "".join(texts) == stream.text
        True
        """
        return Stream(self._session, response_request(input, params, stream=True), RESPONSE)

    def stream_fill(self, prompt: str, **params: Unpack[FillParams]) -> Stream[FillChunk, Filled]:
        """Like `fill`, in chunks as they are made. Each chunk has new text of one or more blanks."""
        return Stream(self._session, fill_request(prompt, params, stream=True), FILL)

    def batch(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int = 8,
        ordered: bool = True,
        progress: ProgressReport = False,
        patience: float | None = DEFAULT_TIMEOUT_S,
        **params: Unpack[CompletionParams],
    ) -> Batch[Prompt, Completion]:
        """`complete` for each of many prompts, `concurrency` at a time; results are BatchResults.

        prompts: read as they are needed; Client reads them on a thread of the batch.
        ordered: True gives results in the prompts' order, False as they are done.
        progress: True draws a bar on stderr; a function gets BatchProgress values, on the batch's thread.
        patience: seconds that the server may be away, for instance for a restart. When it is back, the
            prompts without an answer are sent again. None waits for ever.

        The error of one prompt is in its result's `error`; the other prompts go on. Nothing begins before
        the first `next`; leaving early ends the requests that still run.

        >>> results = list(Client().batch(["One", "Two", "Three"], max_tokens=4))
        >>> [(result.index, result.prompt, result.error) for result in results]
        [(0, 'One', None), (1, 'Two', None), (2, 'Three', None)]
        """
        options = BatchOptions(concurrency, ordered, progress, patience)
        # An unknown keyword is refused now.
        completion_request("", params, method="batch")
        requests = PromptRequests(completion_request, COMPLETION, params)
        return Batch(self._session, prompts, requests, options)

    def batch_chat(
        self,
        conversations: Iterable[Messages],
        *,
        concurrency: int = 8,
        ordered: bool = True,
        progress: ProgressReport = False,
        patience: float | None = DEFAULT_TIMEOUT_S,
        **params: Unpack[ChatParams],
    ) -> Batch[Messages, ChatCompletion]:
        """`chat` for each of many conversations; for the rest see `batch`.

        >>> with Client().batch_chat(["Hi", "Ho"], ordered=False, max_tokens=4) as results:
        ...     sorted(result.index for result in results)
        [0, 1]
        """
        options = BatchOptions(concurrency, ordered, progress, patience)
        chat_request("", params, method="batch_chat")
        return Batch(self._session, conversations, PromptRequests(chat_request, CHAT, params), options)

    def models(self) -> tuple[Model, ...]:
        """The models that the server offers.

        >>> [model.id for model in Client().models()]
        ['demo']
        """
        return self._session.models()

    def tokenize(self, text: Messages, **params: Unpack[TokenizeParams]) -> Tokens:
        """Token ids of a text or, if it is a list, of a chat as the model reads it."""
        return parse_tokens(self._session.send(tokenize_request(text, params)))

    def detokenize(self, token_ids: Sequence[int], *, model: str | None = None) -> str:
        """The text of token ids."""
        return parse_text_of_tokens(self._session.send(detokenize_request(token_ids, model)))

    def health(self) -> Health:
        """Whether the server can answer now. A 503 is an answer, not an error. No retries.

        >>> Client().health().status
        'ok'
        """
        return self._session.health()

    def wait_until_ready(
        self,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        on_progress: Callable[[Health], None] | None = None,
    ) -> Health:
        """Wait for a server that starts or loads its model.

        timeout: longest time, in seconds, without any progress; the whole wait may be longer. None: no limit.
        on_progress: gets the server's health at each change; `health.progress` is the loaded share.

        Raises Timeout, or an APIError if waiting can't help.

        >>> Client().wait_until_ready(on_progress=lambda health: print(health.status)).is_ready
        ok
        True
        """
        readiness = Readiness(timeout, on_progress, time.monotonic())
        while (health := readiness.judge(self._probe(), time.monotonic())) is None:
            self._session.sleep(POLL_INTERVAL_S)
        return health

    def close(self) -> None:
        """Close all connections. Streams that are still open end."""
        self._session.transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _probe(self) -> Health | PenstockError:
        try:
            return self.health()
        except PenstockError as error:
            return error
