"""From the bytes of a stream to typed chunks, and to the whole answer. Pure and incremental."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from penstock_client.chunks import ChatCompletionChunk, CompletionChunk
from penstock_client.errors import ProtocolError, StreamInterrupted
from penstock_client.exchange import JSONObject, Reply, parse_json_object
from penstock_client.failures import error_of_event
from penstock_client.filled import FillChunk, Filled, FillPieces, parse_fill_chunk, parse_filled
from penstock_client.parsing import (
    parse_chat_chunk,
    parse_chat_completion,
    parse_completion,
    parse_completion_chunk,
)
from penstock_client.pieces import Pieces
from penstock_client.responses import (
    LAST_EVENTS,
    Response,
    ResponseChunk,
    ResponsePieces,
    parse_response,
    parse_response_chunk,
)
from penstock_client.results import ChatCompletion, Completion, ToolCall, Usage
from penstock_client.sse import Event, SSEParser

C = TypeVar("C", bound="CompletionChunk | ChatCompletionChunk | FillChunk | ResponseChunk")
R = TypeVar("R", bound="Completion | ChatCompletion | Filled | Response")


@dataclass(frozen=True)
class AnswerFormat(Generic[C, R]):
    """The parsers of one kind of answer: of a whole answer, of a chunk, and of all chunks added up."""

    parse: Callable[[Reply], R]
    parse_chunk: Callable[[JSONObject], C]
    #: Gets the pieces that `pieces` made, and the request's id.
    whole: Callable[[Any, str | None], R]
    pieces: Callable[[], Pieces | FillPieces | ResponsePieces] = Pieces
    #: The types of the last event, for a stream that does not end with [DONE].
    last_types: tuple[str, ...] = ()


COMPLETION = AnswerFormat(parse_completion, parse_completion_chunk, Pieces.completion)
CHAT = AnswerFormat(parse_chat_completion, parse_chat_chunk, Pieces.chat_completion)
FILL = AnswerFormat(parse_filled, parse_fill_chunk, FillPieces.filled, FillPieces)
RESPONSE = AnswerFormat(
    parse_response, parse_response_chunk, ResponsePieces.response, ResponsePieces, LAST_EVENTS
)


class StreamAssembler(Generic[C, R]):
    """Parses chunks and adds them up.

    is_done: [DONE] came, so the answer is complete. has_begun: the caller got a chunk.
    """

    def __init__(self, answer_format: AnswerFormat[C, R]) -> None:
        self._format = answer_format
        self._parser = SSEParser()
        self._pieces: Any = answer_format.pieces()
        self.has_begun = False
        self.is_done = False
        self.request_id: str | None = None

    @property
    def text(self) -> str:
        """The text of choice 0 so far; of a fill, what is in the blanks so far."""
        text: str = self._pieces.text
        return text

    @property
    def finish_reason(self) -> str | None:
        """Why choice 0 ended; None: it has not."""
        reason: str | None = self._pieces.finish_reason
        return reason

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of choice 0 so far."""
        calls: tuple[ToolCall, ...] = self._pieces.tool_calls
        return calls

    @property
    def usage(self) -> Usage | None:
        usage: Usage | None = self._pieces.usage
        return usage

    def begin(self, request_id: str | None) -> None:
        """Begins a stream: the first one, or a retry before the caller got any chunk."""
        self._parser = SSEParser()
        self.request_id = request_id

    def result(self) -> R:
        """The whole answer. Raises StreamInterrupted as `finish` does, ProtocolError for a stream without
        choices."""
        self.finish()
        return self._format.whole(self._pieces, self.request_id)

    def feed(self, block: bytes) -> Iterator[C]:
        """The chunks that `block` completes.

        Raises StreamError for an error event and ProtocolError for an event that is no chunk. The
        chunks before such an event are yielded first.
        """
        for event in self._parser.feed(block):
            if self.is_done:
                return
            if event.data.strip() == "[DONE]":
                self.is_done = True
            else:
                chunk = self._take(event)
                self.has_begun = True
                self.is_done = event.event in self._format.last_types
                yield chunk

    def finish(self) -> None:
        """Call finish() when the bytes end. Raises StreamInterrupted if [DONE] did not come."""
        if not self.is_done:
            raise StreamInterrupted(
                "the stream ended before its [DONE]; the answer is incomplete",
                request_id=self.request_id,
                is_retryable=True,
            )

    def _take(self, event: Event) -> C:
        try:
            data = parse_json_object(event.data)
            failed = data.get("response") if event.event == "response.failed" else None
            told = (failed.get("error") or failed) if isinstance(failed, dict) else data.get("error")
            if error := told or (event.event == "error" and data):
                raise error_of_event(error, self.request_id)
            chunk = self._format.parse_chunk(data)
        except ProtocolError as protocol_error:
            protocol_error.request_id = self.request_id
            raise
        self._pieces.add(chunk)
        return chunk


class StreamedAnswer(Generic[C, R]):
    """The answer of a stream so far; after the last chunk, the whole answer."""

    def __init__(self, assembler: StreamAssembler[C, R]) -> None:
        self._assembler = assembler

    @property
    def text(self) -> str:
        """The text of choice 0."""
        return self._assembler.text

    @property
    def finish_reason(self) -> str | None:
        """Why choice 0 ended; None: it has not."""
        return self._assembler.finish_reason

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of choice 0. Their arguments may be incomplete until the stream ends."""
        return self._assembler.tool_calls

    @property
    def usage(self) -> Usage | None:
        """The counts of tokens, which come with the last chunk."""
        return self._assembler.usage

    @property
    def request_id(self) -> str | None:
        """The server's name for the request, known once the stream is open."""
        return self._assembler.request_id
