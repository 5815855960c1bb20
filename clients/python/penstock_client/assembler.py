"""From the bytes of a stream to typed chunks, and to the whole answer. Pure and incremental."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from penstock_client.errors import ProtocolError, StreamInterrupted
from penstock_client.exchange import JSONObject, parse_json_object
from penstock_client.failures import error_of_event
from penstock_client.results import ChatCompletionChunk, CompletionChunk, Usage
from penstock_client.sse import Event, SSEParser

C = TypeVar("C", bound="CompletionChunk | ChatCompletionChunk")


class StreamAssembler(Generic[C]):
    """Parses chunks and adds them up.

    is_done: [DONE] came, so the answer is whole. finish_reason: of choice 0.
    """

    def __init__(self, parse_chunk: Callable[[JSONObject], C]) -> None:
        self._parse_chunk = parse_chunk
        self._parser = SSEParser()
        self._texts: list[str] = []
        self.is_done = False
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self.request_id: str | None = None

    @property
    def text(self) -> str:
        """The text of choice 0 so far."""
        return "".join(self._texts)

    def feed(self, block: bytes) -> Iterator[C]:
        """The chunks that `block` completes.

        Raises StreamError for an error event and ProtocolError for an event that is no chunk,
        after the chunks before it were handed out.
        """
        for event in self._parser.feed(block):
            if self.is_done:
                return
            if event.data.strip() == "[DONE]":
                self.is_done = True
            else:
                yield self._take(event)

    def finish(self) -> None:
        """To be called when the bytes end. Raises StreamInterrupted if [DONE] did not come."""
        if not self.is_done:
            raise StreamInterrupted(
                "the stream ended before its [DONE]; the answer is incomplete",
                request_id=self.request_id,
            )

    def _take(self, event: Event) -> C:
        try:
            data = parse_json_object(event.data)
            if error := data.get("error") or (event.event == "error" and data):
                raise error_of_event(error, self.request_id)
            chunk = self._parse_chunk(data)
        except ProtocolError as protocol_error:
            protocol_error.request_id = self.request_id
            raise
        self._add(chunk)
        return chunk

    def _add(self, chunk: C) -> None:
        self._texts.append(chunk.text)
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            if choice.index == 0:
                self.finish_reason = choice.finish_reason or self.finish_reason
