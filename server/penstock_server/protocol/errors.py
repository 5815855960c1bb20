"""Errors as clients get them: always OpenAI's error object, whatever failed.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

`message` says what, why and what to do; `type` follows from the status; `param` names the field of the
request that is wrong; `code` is a stable word for programs. The error of a prompt that is too long also has
`n_prompt_tokens` and `n_ctx`, as in llama-server, and `n_answer_tokens` if the prompt is too long only beside
the tokens that are asked for."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.responses import Response

from penstock.errors import (
    ContextOverflow,
    DeadlineExceeded,
    EngineDead,
    EngineStopped,
    InvalidParameter,
    MachineAway,
    NoTokenLeft,
    QueueFull,
    QueueTimeout,
    RequestError,
    RequestFailed,
    StepFailed,
    TooFewAnswers,
)

logger = logging.getLogger(__name__)

#: The default of Retry-After, in seconds.
RETRY_AFTER_S = 5

#: nginx's status for a client that left before its answer. Only logs and metrics show this status.
CLIENT_CLOSED_REQUEST = 499

#: The most wrong fields that one message names.
MAX_REPORTED_FIELDS = 3

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}

#: Codes of errors that the router itself raises.
_ROUTER_CODES = {
    400: "invalid_json",
    404: "unknown_url",
    405: "method_not_allowed",
    413: "request_too_large",
}

#: The most characters of an unknown path that a message shows.
_MAX_SHOWN = 100

#: OpenAI's codes for pydantic's kinds of errors. All kinds that end with "_type" have the code
#: "invalid_type".
_VALIDATION_CODES = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "unsupported_parameter": "unsupported_parameter",
}


#: The most characters of a message, and of a name or value of the client's in it.
MAX_MESSAGE_CHARS, MAX_SHOWN_CHARS = 2000, 200


def cut(text: str, most: int) -> str:
    """A text without its middle, if it is too long: what is wrong stands at its beginning, and what to do at
    its end."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


class ErrorDetail(BaseModel):
    model_config = ConfigDict(extra="allow")

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    error: ErrorDetail


class ApiError(HTTPException):
    """An error answer. Any code that finds a request impossible may raise it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, int] | None = None,
    ) -> None:
        """extra: further members of the error object."""
        super().__init__(status, cut(message, MAX_MESSAGE_CHARS), dict(headers) if headers else None)
        self.code = code
        self.param = param and cut(param, MAX_SHOWN_CHARS)
        self.extra = dict(extra or {})

    @property
    def type(self) -> str:
        if self.status_code >= 500:
            return "server_error"
        return _TYPES.get(self.status_code, "invalid_request_error")

    @property
    def body(self) -> dict[str, Any]:
        error = {
            "message": self.detail,
            "type": self.type,
            "param": self.param,
            "code": self.code,
            **self.extra,
        }
        return {"error": error}

    def response(self) -> Response:
        # ASCII, because a client may have sent half a surrogate pair as a field's name.
        body = json.dumps(self.body)
        return Response(body, self.status_code, self.headers, media_type="application/json")


def unavailable(message: str, code: str, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    """An error 503, with the seconds after which to try again."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after_s)})


def internal_error() -> ApiError:
    """An error 500 for a bug of ours. The client learns only that a retry won't help."""
    message = "The server failed on this request; its log has the details."
    return ApiError(500, message, code="internal_error", headers={"X-Should-Retry": "false"})


def api_error(error: Exception) -> ApiError:
    """The error answer for `error`. An unforeseen error goes to the log, and the client gets a 500."""
    match error:
        case ApiError():
            return error
        case HTTPException():
            return _from_router(error)
        case RequestValidationError():
            return _from_validation(error)
        case ContextOverflow():
            size = {"n_prompt_tokens": error.num_prompt_tokens, "n_ctx": error.max_model_len}
            if error.num_answer_tokens:
                size["n_answer_tokens"] = error.num_answer_tokens
            return ApiError(400, str(error), code="context_length_exceeded", extra=size)
        case InvalidParameter():
            return ApiError(400, str(error), code="invalid_value", param=error.param)
        case RequestError():
            return ApiError(400, str(error), code="invalid_request")
        case QueueFull():
            message = f"The server is busy: {error}. Try again later."
            return unavailable(message, "overloaded", error.retry_after_s or RETRY_AFTER_S)
        case EngineStopped():
            return unavailable("The server is shutting down.", "shutting_down")
        case MachineAway():
            return unavailable(f"This request could not be computed: {error}.", "machine_away")
        case StepFailed():
            return ApiError(500, f"This request could not be computed: {error}.", code="step_failed")
        case QueueTimeout():
            message = f"The server is busy: {error}. Try again later."
            return unavailable(message, "queue_timeout", error.retry_after_s or RETRY_AFTER_S)
        case DeadlineExceeded():
            message = (
                f"This request was ended: {error}. Ask for fewer tokens, or raise the server's "
                "--request-timeout."
            )
            return ApiError(504, message, code="deadline_exceeded", headers={"X-Should-Retry": "false"})
        case NoTokenLeft():
            param = next((name for name in error.params if " " not in name), None)
            message = f"This request contradicts itself: {error}."
            return ApiError(400, message, code="invalid_value", param=param)
        case TooFewAnswers():
            return ApiError(400, f"This request can't be answered: {error}.", code="invalid_value", param="n")
        case RequestFailed():
            message = f"This request could not be computed: {error}."
            return ApiError(500, message, code="request_failed", headers={"X-Should-Retry": "false"})
        case EngineDead():
            return unavailable("The engine has stopped; the server's log says why.", "engine_dead")
        case _:
            logger.error("a request failed", exc_info=error)
            return internal_error()


def routing_error(error: HTTPException, method: str, path: str, known: Sequence[str]) -> HTTPException:
    """An error of the router, with a hint: the path among `known` that was probably meant, or the methods
    that the path takes."""
    shown, method = repr(path[:_MAX_SHOWN])[1:-1], method[:_MAX_SHOWN]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{method} is not allowed for {shown}; it takes {allowed}."
        if allowed == "GET":  # head_requests.py answers HEAD for all of them
            return HTTPException(405, message, {"Allow": "GET, HEAD"})
    elif error.status_code == 404:
        near = _nearest(path[:_MAX_SHOWN], known)
        hint = f"did you mean {near}?" if near else "GET /openapi.json lists what there is."
        message = f"There is no {method} {shown} here; {hint}"
    else:
        return error
    return HTTPException(error.status_code, message, error.headers)


def _nearest(path: str, known: Sequence[str]) -> str | None:
    """The route that was probably meant; None if no route is similar. /v1 does not count, since all routes
    have it. The last word must be similar by itself: /v1/conversations is no misspelling of
    /v1/completions."""
    near = max(known, key=lambda route: _likeness(path.removeprefix("/v1"), route.removeprefix("/v1")))
    is_near = _likeness(path.removeprefix("/v1"), near.removeprefix("/v1")) >= 0.75
    return near if is_near and _likeness(_last_word(path), _last_word(near)) >= 0.7 else None


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _last_word(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _from_router(error: HTTPException) -> ApiError:
    status = error.status_code
    message = error.detail
    if message == HTTPStatus(status).phrase:
        message = f"{status} {message}"
    return ApiError(status, message, code=_ROUTER_CODES.get(status), headers=error.headers)


def _from_validation(error: RequestValidationError) -> ApiError:
    """An error 400 that names the wrong fields. Its `param` and `code` are those of the first field."""
    found: dict[str | None, list[str]] = {}
    errors: list[dict[str, Any]] = list(error.errors())
    for each in errors:
        found.setdefault(_field(each, error.body), []).append(_message(each))
    parts = [
        f"{field}: {' or '.join(dict.fromkeys(messages))}" if field else messages[0]
        for field, messages in found.items()
    ]
    if len(parts) > MAX_REPORTED_FIELDS:
        parts[MAX_REPORTED_FIELDS:] = [f"and {len(parts) - MAX_REPORTED_FIELDS} more"]
    kind = errors[0]["type"]
    code = _VALIDATION_CODES.get(kind, "invalid_type" if kind.endswith("_type") else None)
    return ApiError(400, "; ".join(parts), code=code or "invalid_value", param=next(iter(found)))


def _message(error: dict[str, Any]) -> str:
    """pydantic's own message, except where that says too little."""
    match error:
        case {"type": "missing", "loc": ("body",)}:
            return "The request has no body; send a JSON object."
        case {"type": "extra_forbidden"}:
            return "there is no such field (leave it out, or start the server with --lenient)"
        case _:
            return cut(str(error["msg"]), 2 * MAX_SHOWN_CHARS)


def _field(error: dict[str, Any], body: Any) -> str | None:
    """The dotted path of the wrong field; None if the whole body is wrong.

    pydantic's location also has names of union members, which mean nothing to a client. The path keeps those
    steps only that lead into the body as the client sent it.
    """
    if "param" in error.get("ctx", {}):
        return str(error["ctx"]["param"])
    path = list(_steps(error["loc"][1:], body))
    if error["type"] == "missing" and len(error["loc"]) > 1:
        path.append(str(error["loc"][-1]))
    if not path and len(error["loc"]) > 1 and isinstance(body, dict):
        return str(error["loc"][1])  # the field has another name in the body: see generation_fields.py
    return ".".join(path) or None


def _steps(location: Iterable[str | int], value: Any) -> Iterable[str]:
    for step in location:
        is_key = isinstance(value, dict) and step in value
        is_index = isinstance(value, list) and isinstance(step, int)
        if is_key or is_index:
            value = value[step]
            yield cut(str(step), MAX_SHOWN_CHARS)
