"""Errors in the form of Anthropic's API: {"type": "error", "error": {"type", "message"}, "request_id"}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel


class MessageErrorDetail(BaseModel):
    type: str
    message: str


class MessageError(BaseModel):
    type: Literal["error"] = "error"
    error: MessageErrorDetail
    request_id: str | None = None


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def message_error(status: int, error: Mapping[str, Any], request_id: str | None = None) -> dict[str, Any]:
    """The body of an answer, and the data of a stream's event `error`.

    error: the members of OpenAI's error object. This form has no place for the name of the wrong field, so
    that the name stands in front of a message which lacks it."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message, param = str(error["message"]), error.get("param")
    if param and str(param) not in message:
        message = f"{param}: {message}"
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
    return body | ({"request_id": request_id} if request_id else {})
