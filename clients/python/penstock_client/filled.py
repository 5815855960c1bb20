"""Answers of `fill`, whole and in pieces, as frozen values, and how they are read. Knows no HTTP library."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

from penstock_client.errors import ProtocolError
from penstock_client.exchange import JSONObject, Reply
from penstock_client.fields import get, objects, require
from penstock_client.parsing import common_fields, traceable
from penstock_client.results import ToolCall, Usage, raw_field


@dataclass(frozen=True)
class FilledSpan:
    """One blank, or in a chunk its new text.

    position: where the blank begins in the prompt, in characters.
    finish_reason: "stop", or "length" if max_tokens or max_tokens_per_blank cut the text off. None: the text
        goes on in a later chunk.
    """

    index: int
    position: int
    text: str
    finish_reason: str | None = None
    raw: JSONObject = raw_field()


@dataclass(frozen=True)
class Filled:
    """The answer of `fill`. `text` is the prompt with the texts of the spans in its blanks."""

    id: str
    model: str
    created: int
    text: str
    spans: tuple[FilledSpan, ...]
    usage: Usage | None = None
    request_id: str | None = None
    _: KW_ONLY
    raw: JSONObject = raw_field()


@dataclass(frozen=True)
class FillChunk:
    """A piece of a streamed fill. `text` and `usage` are in the last chunk alone."""

    id: str
    model: str
    spans: tuple[FilledSpan, ...]
    text: str | None = None
    usage: Usage | None = None
    created: int = 0
    _: KW_ONLY
    raw: JSONObject = raw_field()


@traceable
def parse_filled(reply: Reply) -> Filled:
    data = reply.json_object()
    text = require(data, "text", str)
    return Filled(text=text, spans=_spans(data), request_id=reply.request_id, **common_fields(data))


def parse_fill_chunk(data: JSONObject) -> FillChunk:
    return FillChunk(spans=_spans(data), text=get(data, "text", str, None), **common_fields(data))


def _spans(data: JSONObject) -> tuple[FilledSpan, ...]:
    return tuple(
        FilledSpan(
            index=require(span, "index", int),
            position=get(span, "position", int, 0),
            text=require(span, "text", str),
            finish_reason=get(span, "finish_reason", str, None),
            raw=span,
        )
        for span in objects(data, "spans")
    )


class FillPieces:
    """The chunks of a streamed fill so far, added up."""

    tool_calls: tuple[ToolCall, ...] = ()

    def __init__(self) -> None:
        self._last: FillChunk | None = None
        self._spans: dict[int, FilledSpan] = {}
        self._whole: str | None = None
        self.usage: Usage | None = None

    def add(self, chunk: FillChunk) -> None:
        self._last = chunk
        self.usage = chunk.usage or self.usage
        self._whole = chunk.text if chunk.text is not None else self._whole
        for span in chunk.spans:
            before = self._spans.get(span.index)
            text = (before.text if before else "") + span.text
            self._spans[span.index] = replace(span, text=text, raw={})

    @property
    def spans(self) -> tuple[FilledSpan, ...]:
        return tuple(span for _, span in sorted(self._spans.items()))

    @property
    def text(self) -> str:
        """The whole text, once it has come; until then what is in the blanks."""
        return self._whole if self._whole is not None else "".join(span.text for span in self.spans)

    @property
    def finish_reason(self) -> str | None:
        """Why the last blank ended."""
        return self.spans[-1].finish_reason if self._spans else None

    def filled(self, request_id: str | None) -> Filled:
        """The whole answer. Raises ProtocolError for a stream without the whole text."""
        last, text = self._last, self._whole
        if last is None or text is None:
            raise ProtocolError("the stream had no text", request_id=request_id)
        return Filled(last.id, last.model, last.created, text, self.spans, self.usage, request_id)
