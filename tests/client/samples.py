"""Answers of a server, as JSON objects and as bytes of an event stream."""

from __future__ import annotations

import json
from typing import Any

USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 3},
}
MODELS = {
    "object": "list",
    "data": [{"id": "tiny", "object": "model", "created": 7, "owned_by": "penstock"}],
}
DONE = b"data: [DONE]\n\n"


def completion(text: str = "Hello") -> dict[str, Any]:
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1700000000,
        "model": "tiny",
        "choices": [{"index": 0, "text": text, "finish_reason": "length", "logprobs": None}],
        "usage": USAGE,
    }


def chat(text: str = "Hello") -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "refusal": None}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "tiny",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}],
        "usage": USAGE,
    }


def event(data: object) -> bytes:
    """An event whose data is `data` as JSON, with non-ASCII characters as UTF-8."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def completion_event(text: str, finish_reason: str | None = None, index: int = 0) -> bytes:
    choice = {"index": index, "text": text, "finish_reason": finish_reason}
    return event({"id": "cmpl-1", "model": "tiny", "choices": [choice], "usage": None})


def chat_event(delta: dict[str, Any], finish_reason: str | None = None, index: int = 0) -> bytes:
    choice = {"index": index, "delta": delta, "finish_reason": finish_reason}
    return event({"id": "chatcmpl-1", "model": "tiny", "choices": [choice], "usage": None})


def usage_event() -> bytes:
    return event({"id": "cmpl-1", "model": "tiny", "choices": [], "usage": USAGE})


def completion_stream() -> bytes:
    """A whole stream, with a keep-alive comment, of the text 'Grüße 🌍!'."""
    return b"".join(
        [
            b": keep-alive\n\n",
            completion_event("Grüße "),
            completion_event("🌍!", "stop"),
            usage_event(),
            DONE,
        ]
    )


def chat_stream() -> bytes:
    """The same for a chat."""
    return b"".join(
        [
            b": keep-alive\n\n",
            chat_event({"role": "assistant", "content": ""}),
            chat_event({"content": "Grüße "}),
            chat_event({"content": "🌍!"}),
            chat_event({}, "stop"),
            usage_event(),
            DONE,
        ]
    )
