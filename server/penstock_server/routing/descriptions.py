"""Parts of the OpenAPI document that FastAPI can't find out by itself: errors and streams."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from penstock_server.protocol.errors import ErrorBody


def errors_as(body: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's description of errors in the form of an API."""
    # FastAPI builds a validator of each response's model, route by route. So the default alone has the model,
    # and the others refer to its schema.
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    errors: dict[int | str, dict[str, Any]] = {
        status: {"content": {"application/json": {"schema": schema}}}
        for status in (400, 401, 404, 413, 415, 500, 503)
    }
    # With a described default FastAPI does not add a 422, which we never send.
    errors["default"] = {"model": body, "description": "Any other error"}
    return errors


ERRORS = errors_as(ErrorBody)


def event_stream_of(model: str, last: str | None = "[DONE]") -> dict[str, Any]:
    """OpenAPI's description of an answer that may also be a stream of `model` objects, or of an error.

    last: the data of the last event; None if the last event is an object like the others.
    """
    objects = [{"$ref": f"#/components/schemas/{name}"} for name in (model, "ErrorBody")]
    encoded = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": objects}}
    data = encoded if last is None else {"anyOf": [{"const": last}, encoded]}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {"content": {"text/event-stream": {"itemSchema": event}}}


def line_stream_of(model: str) -> dict[str, Any]:
    """OpenAPI's description of an answer that may also be a stream of lines, each a `model` object."""
    return {"content": {"application/x-ndjson": {"itemSchema": {"$ref": f"#/components/schemas/{model}"}}}}
