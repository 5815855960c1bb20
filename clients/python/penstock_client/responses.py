"""Answers of `respond`, whole and in pieces, as frozen values, and how they are read. Knows no HTTP
library."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, TypeVar, overload

from penstock_client.errors import ProtocolError
from penstock_client.exchange import JSONObject, Reply
from penstock_client.fields import get, objects, require
from penstock_client.parsing import traceable
from penstock_client.results import Parseable, ToolCall, Usage, parse_text, raw_field

T = TypeVar("T")
#: The types of the events with which a stream ends.
LAST_EVENTS = ("response.completed", "response.incomplete")
_TEXT, _REASONING = "response.output_text.delta", "response.reasoning_text.delta"


@dataclass(frozen=True)
class Response:
    """The answer of `respond`.

    output: the items of the answer (messages, calls, reasoning) as the next request's input takes them.
    status: "completed", or "incomplete" if a limit ended the answer.
    """

    id: str
    model: str
    created: int
    status: str
    output: tuple[JSONObject, ...]
    usage: Usage | None = None
    request_id: str | None = None
    _: KW_ONLY
    raw: JSONObject = raw_field()

    @property
    def text(self) -> str:
        """The texts of all messages."""
        return "".join(self._texts("message", "output_text"))

    @property
    def reasoning(self) -> str | None:
        """What the model thought before it answered; None if it did not."""
        return "".join(self._texts("reasoning", "reasoning_text")) or None

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls, whose results `tool_result` takes."""
        return tuple(
            ToolCall(
                id=get(item, "call_id", str, ""),
                name=require(item, "name", str),
                arguments=get(item, "arguments", str, ""),
                raw=item,
            )
            for item in self.output
            if item.get("type") == "function_call"
        )

    @overload
    def parse(self) -> Any: ...
    @overload
    def parse(self, kind: Parseable[T]) -> T: ...
    def parse(self, kind: Parseable[T] | None = None) -> T | Any:
        """The text as JSON, or as an object of `kind`, a pydantic model. Raises as parse_text() does."""
        return parse_text(self.text, self.status == "incomplete", kind, self.request_id)

    def _texts(self, item_type: str, part_type: str) -> list[str]:
        return [
            get(part, "text", str, "")
            for item in self.output
            if item.get("type") == item_type
            for part in objects(item, "content")
            if part.get("type") == part_type
        ]


@dataclass(frozen=True)
class ResponseChunk:
    """An event of a streamed response. `text` and `reasoning` are what is new; the last event has the whole
    `response`."""

    type: str
    text: str = ""
    reasoning: str = ""
    response: Response | None = None
    raw: JSONObject = raw_field()


@traceable
def parse_response(reply: Reply) -> Response:
    return replace(_response(reply.json_object()), request_id=reply.request_id)


def parse_response_chunk(data: JSONObject) -> ResponseChunk:
    kind = require(data, "type", str)
    delta = get(data, "delta", str, "") if kind in (_TEXT, _REASONING) else ""
    whole = _response(require(data, "response", dict)) if kind in LAST_EVENTS else None
    return ResponseChunk(
        kind, delta if kind == _TEXT else "", delta if kind == _REASONING else "", whole, data
    )


def _response(data: JSONObject) -> Response:
    usage = get(data, "usage", dict, None)
    return Response(
        id=get(data, "id", str, ""),
        model=get(data, "model", str, ""),
        created=int(get(data, "created_at", int, 0)),
        status=get(data, "status", str, "completed"),
        output=tuple(objects(data, "output")),
        usage=None if usage is None else _usage(usage),
        raw=data,
    )


def _usage(usage: JSONObject) -> Usage:
    prompt, answer = (get(usage, name, int, 0) for name in ("input_tokens", "output_tokens"))
    prompt_details: JSONObject = get(usage, "input_tokens_details", dict, {})
    details: JSONObject = get(usage, "output_tokens_details", dict, {})
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=answer,
        total_tokens=get(usage, "total_tokens", int, prompt + answer),
        cached_tokens=get(prompt_details, "cached_tokens", int, 0),
        reasoning_tokens=get(details, "reasoning_tokens", int, 0),
        raw=usage,
    )


class ResponsePieces:
    """The events of a streamed response so far, added up."""

    def __init__(self) -> None:
        self._text = ""
        self._whole: Response | None = None

    def add(self, chunk: ResponseChunk) -> None:
        self._text += chunk.text
        self._whole = chunk.response or self._whole

    @property
    def text(self) -> str:
        return self._text

    @property
    def finish_reason(self) -> str | None:
        """The status of the response, once it has ended."""
        return self._whole.status if self._whole else None

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Known once the response has ended."""
        return self._whole.tool_calls if self._whole else ()

    @property
    def usage(self) -> Usage | None:
        return self._whole.usage if self._whole else None

    def response(self, request_id: str | None) -> Response:
        """The whole answer. Raises ProtocolError for a stream without it."""
        if self._whole is None:
            raise ProtocolError("the stream had no response", request_id=request_id)
        return replace(self._whole, request_id=request_id)
