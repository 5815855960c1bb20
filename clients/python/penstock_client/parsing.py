"""From the server's JSON to the values of results.py and chunks.py. Pure; knows no HTTP library.

Most fields may be absent, since servers of this API differ in their fields. A field of a wrong type, or an
answer without choices, is a ProtocolError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from penstock_client.chunks import (
    ChatChunkChoice,
    ChatCompletionChunk,
    CompletionChunk,
    Delta,
    ToolCallDelta,
)
from penstock_client.errors import ProtocolError
from penstock_client.exchange import JSONObject, Reply
from penstock_client.fields import get, integers, objects, require
from penstock_client.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from penstock_client.results import (
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    Message,
    TokenLogprob,
    ToolCall,
    Usage,
)

T = TypeVar("T")


def traceable(parse: Callable[[Reply], T]) -> Callable[[Reply], T]:
    """`parse` with ProtocolErrors that name the request, so that it can be found in the server's log."""

    @functools.wraps(parse)
    def parse_traceably(reply: Reply) -> T:
        try:
            return parse(reply)
        except ProtocolError as error:
            error.request_id = reply.request_id
            raise

    return parse_traceably


@traceable
def parse_completion(reply: Reply) -> Completion:
    data = reply.json_object()
    return Completion(
        choices=tuple(_completion_choice(choice) for choice in _answers(data)),
        request_id=reply.request_id,
        **common_fields(data),
    )


@traceable
def parse_chat_completion(reply: Reply) -> ChatCompletion:
    data = reply.json_object()
    return ChatCompletion(
        choices=tuple(_chat_choice(choice) for choice in _answers(data)),
        request_id=reply.request_id,
        prompt_token_ids=integers(data, "prompt_token_ids"),
        prompt_logprobs=prompt_logprobs(data),
        **common_fields(data),
    )


def parse_completion_chunk(data: JSONObject) -> CompletionChunk:
    choices = tuple(_completion_choice(choice) for choice in objects(data, "choices"))
    return CompletionChunk(choices=choices, **common_fields(data))


def parse_chat_chunk(data: JSONObject) -> ChatCompletionChunk:
    return ChatCompletionChunk(
        choices=tuple(_chat_chunk_choice(choice) for choice in objects(data, "choices")),
        prompt_token_ids=integers(data, "prompt_token_ids"),
        **common_fields(data),
    )


def common_fields(data: JSONObject) -> dict[str, Any]:
    """The fields that every answer and chunk has."""
    return {
        "id": get(data, "id", str, ""),
        "model": get(data, "model", str, ""),
        "created": get(data, "created", int, 0),
        "usage": _usage(data),
        "raw": data,
    }


def _completion_choice(choice: JSONObject) -> CompletionChoice:
    return CompletionChoice(
        text=require(choice, "text", str),
        prompt_token_ids=integers(choice, "prompt_token_ids"),
        prompt_logprobs=prompt_logprobs(choice),
        **_choice_fields(choice, completion_logprobs),
    )


def _chat_choice(choice: JSONObject) -> ChatChoice:
    message = _message(require(choice, "message", dict))
    return ChatChoice(message=message, **_choice_fields(choice, chat_logprobs))


def _chat_chunk_choice(choice: JSONObject) -> ChatChunkChoice:
    delta = _delta(require(choice, "delta", dict))
    return ChatChunkChoice(delta=delta, **_choice_fields(choice, chat_logprobs))


def _choice_fields(
    choice: JSONObject, parse_logprobs: Callable[[JSONObject | None], tuple[TokenLogprob, ...] | None]
) -> dict[str, Any]:
    """The fields that every choice has."""
    return {
        "index": get(choice, "index", int, 0),
        "finish_reason": get(choice, "finish_reason", str, None),
        "logprobs": parse_logprobs(get(choice, "logprobs", dict, None)),
        "stop_reason": _stop_reason(choice),
        "token_ids": integers(choice, "token_ids"),
        "raw": choice,
    }


def _message(message: JSONObject) -> Message:
    return Message(
        role=get(message, "role", str, "assistant"),
        content=get(message, "content", str, None),
        tool_calls=tuple(_tool_call(call) for call in objects(message, "tool_calls")),
        reasoning=_reasoning(message),
        raw=message,
    )


def _tool_call(call: JSONObject) -> ToolCall:
    function: JSONObject = require(call, "function", dict)
    return ToolCall(
        id=get(call, "id", str, ""),
        name=require(function, "name", str),
        arguments=get(function, "arguments", str, ""),
        raw=call,
    )


def _delta(delta: JSONObject) -> Delta:
    return Delta(
        role=get(delta, "role", str, None),
        content=get(delta, "content", str, None),
        tool_calls=tuple(_tool_call_delta(call) for call in objects(delta, "tool_calls")),
        reasoning=_reasoning(delta),
        raw=delta,
    )


def _reasoning(part: JSONObject) -> str | None:
    """The reasoning of a message or a delta, under either name that servers give it."""
    own: str | None = get(part, "reasoning_content", str, None)
    return own if own is not None else get(part, "reasoning", str, None)


def _tool_call_delta(call: JSONObject) -> ToolCallDelta:
    function: JSONObject = get(call, "function", dict, {})
    return ToolCallDelta(
        index=get(call, "index", int, 0),
        id=get(call, "id", str, None),
        name=get(function, "name", str, None),
        arguments=get(function, "arguments", str, ""),
        raw=call,
    )


def _stop_reason(choice: JSONObject) -> str | int | None:
    value = choice.get("stop_reason")
    return value if isinstance(value, str | int) else None


def _usage(data: JSONObject) -> Usage | None:
    usage = get(data, "usage", dict, None)
    if usage is None:
        return None
    prompt, completion = (get(usage, name, int, 0) for name in ("prompt_tokens", "completion_tokens"))
    details: JSONObject = get(usage, "prompt_tokens_details", dict, {})
    guesses: JSONObject = get(usage, "completion_tokens_details", dict, {})
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=get(usage, "total_tokens", int, prompt + completion),
        cached_tokens=get(details, "cached_tokens", int, 0),
        accepted_prediction_tokens=get(guesses, "accepted_prediction_tokens", int, 0),
        rejected_prediction_tokens=get(guesses, "rejected_prediction_tokens", int, 0),
        reasoning_tokens=get(guesses, "reasoning_tokens", int, 0),
        raw=usage,
    )


def _answers(data: JSONObject) -> list[JSONObject]:
    choices = objects(data, "choices")
    if not choices:
        raise ProtocolError(f"the answer has no choices: {data!r:.200}")
    return choices
