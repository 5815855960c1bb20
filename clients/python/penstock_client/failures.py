"""From the server's error objects to the classes of errors.py. Pure; knows no HTTP library."""

from __future__ import annotations

import math
from email.utils import parsedate_to_datetime
from typing import TypedDict

from penstock_client.errors import (
    APIError,
    AuthenticationFailed,
    BadRequest,
    ContextOverflow,
    DeadlineExceeded,
    NotFound,
    PermissionDenied,
    ProtocolError,
    RateLimited,
    RequestTooLarge,
    ServerBusy,
    ServerError,
    StreamError,
)
from penstock_client.exchange import JSONObject, Reply

_CLASSES: dict[int, type[APIError]] = {
    400: BadRequest,
    401: AuthenticationFailed,
    403: PermissionDenied,
    404: NotFound,
    413: RequestTooLarge,
    429: RateLimited,
    503: ServerBusy,
    504: DeadlineExceeded,
}
# Statuses for which the server turned the request away, or (502) a proxy found no server. A request
# that got a 500 mostly fails again, and one that got a 504 takes too long again.
_RETRYABLE = (429, 502, 503)
# The codes of the same errors inside a stream, whose status was 200: our codes, and vLLM's.
_RETRYABLE_CODES = (
    *("shutting_down", "engine_dead", "overloaded", "queue_timeout", "model_loading"),
    *(str(status) for status in _RETRYABLE),
)


class _Fields(TypedDict):
    message: str
    type: str | None
    code: str | None
    param: str | None


def checked(reply: Reply, now_s: float) -> Reply:
    """`reply` if its status is a success. Raises the error of error_of_reply() otherwise."""
    if not reply.is_success:
        raise error_of_reply(reply, now_s)
    return reply


def error_of_reply(reply: Reply, now_s: float) -> APIError:
    """The error for a reply that is no success. now_s: the time, in seconds since 1970."""
    kind = _CLASSES.get(reply.status, ServerError if reply.status >= 500 else APIError)
    fields = _fields_of_body(reply)
    if kind is BadRequest and _is_overflow(fields):
        kind = ContextOverflow
    is_forbidden = reply.headers.get("x-should-retry", "").strip().lower() == "false"
    return kind(
        **fields,
        status=reply.status,
        request_id=reply.request_id,
        retry_after=retry_after_s(reply.headers.get("retry-after"), now_s),
        is_retryable=reply.status in _RETRYABLE and not is_forbidden,
    )


def error_of_event(error: object, request_id: str | None) -> StreamError:
    """The error for an error object (or other value) that came as an event of a stream."""
    fields = _fields(error)
    is_retryable = fields["code"] in _RETRYABLE_CODES
    return StreamError(**fields, request_id=request_id, is_retryable=is_retryable)


def retry_after_s(value: str | None, now_s: float) -> float | None:
    """The seconds to wait that a Retry-After header asks for, in seconds or as a date; None if unusable.

    >>> retry_after_s("1.5", now_s=0.0)
    1.5
    >>> retry_after_s("Thu, 01 Jan 1970 00:01:40 GMT", now_s=40.0)
    60.0
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now_s
        except (ValueError, OverflowError):
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _is_overflow(fields: _Fields) -> bool:
    """Whether an error is a context overflow, by OpenAI's code or llama-server's type."""
    return fields["code"] == "context_length_exceeded" or fields["type"] == "exceed_context_size_error"


def _fields_of_body(reply: Reply) -> _Fields:
    try:
        data = reply.json_object()
    except ProtocolError:
        # The body is not Penstock's: it is a proxy's page, or the server died in the middle of an answer.
        text = reply.body[:200].decode("utf-8", "replace").strip()
        return _fields(text or f"the server answered with status {reply.status}")
    # Other servers send the error object itself as the body, or a `detail`.
    return _fields(data.get("error") or data.get("detail") or data)


def _fields(error: object) -> _Fields:
    data: JSONObject = error if isinstance(error, dict) else {"message": error}
    return _Fields(
        message=_text(data.get("message")) or f"the server reported an error: {error!r:.200}",
        type=_text(data.get("type")),
        code=_text(data.get("code")),
        param=_text(data.get("param")),
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)
