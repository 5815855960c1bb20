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
    that the name stands in front of a message which lacks it. Claude Code makes room in a full context only
    when it reads Anthropic's own sentence."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message, param = str(error["message"]), error.get("param")
    if error.get("code") == "context_length_exceeded":
        message = _overflow(error["n_prompt_tokens"], error.get("n_answer_tokens", 0), error["n_ctx"])
    if param and str(param) not in message:
        message = f"{param}: {message}"
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
    return body | ({"request_id": request_id} if request_id else {})


def _overflow(num_prompt: int, num_answer: int, num_context: int) -> str:
    """Anthropic's sentence for a prompt without room, or without room beside so many tokens of an answer."""
    if num_answer:
        return (
            f"input length and `max_tokens` exceed context limit: {num_prompt} + {num_answer} > "
            f"{num_context}, decrease input length or `max_tokens` and try again"
        )
    # A prompt that fills the context leaves no room for a token of the answer.
    return f"prompt is too long: {num_prompt} tokens > {min(num_context, num_prompt - 1)} maximum"
