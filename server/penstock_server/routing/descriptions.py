"""Parts of the OpenAPI document that FastAPI can't find out by itself: errors and streams."""

from __future__ import annotations

from typing import Any

from penstock_server.protocol.errors import ErrorBody

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 413, 415, 500, 503)
}
# With a described default FastAPI does not add a 422, which we never send.
ERRORS["default"] = {"model": ErrorBody, "description": "Any other error"}


def event_stream_of(model: str, last: str | None = "[DONE]") -> dict[str, Any]:
    """OpenAPI's description of an answer that may also be a stream of `model` objects, or of an error.

    last: the data of the last event; None if the last event is an object like the others.
    """
    objects = [{"$ref": f"#/components/schemas/{name}"} for name in (model, "ErrorBody")]
    encoded = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": objects}}
    data = encoded if last is None else {"anyOf": [{"const": last}, encoded]}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {"content": {"text/event-stream": {"itemSchema": event}}}
