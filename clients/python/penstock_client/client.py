"""Client: a Penstock server as Python methods that wait for their answer."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
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
from penstock_client.streams import Stream
from penstock_client.transport import StreamReply, Transport

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from penstock_client.params import ChatParams, CompletionParams

T = TypeVar("T")


class Client:
    """A client of one Penstock server, or of another server with OpenAI's API.

    base_url: default PENSTOCK_BASE_URL, else http://127.0.0.1:8000.
    api_key: default PENSTOCK_API_KEY, else none is sent.
    model: for calls that name none; default the server's only model, looked up once.
    timeout: longest silence of the server, in seconds; None waits for ever. A stream is rarely
        silent: each chunk and each keep-alive counts. An unstreamed answer is one long silence.
    connect_timeout: longest wait for a connection, in seconds.
    max_retries: how often a request is sent again that the server did not begin to work on: no
        connection, or turned away with 429 or 503. Retry-After is honoured up to two minutes.
    sleep: what waits, in seconds, before a retry.

    Raises ValueError for settings that cannot work; methods raise the errors of errors.py.
    Safe to use from several threads. Close it, or use `with`:

        with Client() as client:
            print(client.chat("Why is the sky blue?").text)
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
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        settings = Settings.resolve(base_url, api_key, timeout, connect_timeout, os.environ)
        self._retry_policy = RetryPolicy(max_retries)
        self._transport = Transport(settings)
        self._model = model
        self._sleep = sleep

    def complete(self, prompt: Prompt, **params: Unpack[CompletionParams]) -> Completion:
        """Continue `prompt`: a text, texts, ids, or lists of them. Keywords: CompletionParams."""
        request = completion_request(prompt, params)
        return parse_completion(self._send(request))

    def chat(self, messages: Messages, **params: Unpack[ChatParams]) -> ChatCompletion:
        """Answer `messages`: what the user says, or a whole conversation. Keywords: ChatParams."""
        request = chat_request(messages, params)
        return parse_chat_completion(self._send(request))

    def stream_complete(
        self, prompt: Prompt, **params: Unpack[CompletionParams]
    ) -> Stream[CompletionChunk]:
        """Like `complete`, in chunks as they are made."""
        request = completion_request(prompt, params, stream=True)
        return self._stream(request, parse_completion_chunk)

    def stream_chat(
        self, messages: Messages, **params: Unpack[ChatParams]
    ) -> Stream[ChatCompletionChunk]:
        """Like `chat`, in chunks as they are made."""
        request = chat_request(messages, params, stream=True)
        return self._stream(request, parse_chat_chunk)

    def models(self) -> tuple[Model, ...]:
        """The models that the server offers."""
        return parse_models(self._send(MODELS))

    def health(self) -> Health:
        """Whether the server can answer now; a 503 is an answer, not an error. Never retries."""
        reply = self._transport.send(HEALTH)
        return parse_health(reply if reply.status == 503 else checked(reply, time.time()))

    def close(self) -> None:
        """Close all connections. Streams that are still open end."""
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _send(self, request: Request) -> Reply:
        ready = self._with_model(request)
        return self._retrying(lambda: checked(self._transport.send(ready), time.time()))

    def _stream(self, request: Request, parse_chunk: Callable[[JSONObject], C]) -> Stream[C]:
        def open_reply() -> StreamReply:
            ready = self._with_model(request)
            return self._retrying(lambda: self._transport.open(ready))

        return Stream(open_reply, StreamAssembler(parse_chunk))

    def _with_model(self, request: Request) -> Request:
        if not request.needs_model:
            return request
        if self._model is None:
            self._model = only_model(self.models())
        return request.with_model(self._model)

    def _retrying(self, attempt: Callable[[], T]) -> T:
        num_retries = 0
        while True:
            try:
                return attempt()
            except PenstockError as error:
                delay_s = self._retry_policy.delay_s(num_retries, error, random.random())
                if delay_s is None:
                    raise
            self._sleep(delay_s)
            num_retries += 1
