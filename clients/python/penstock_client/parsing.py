"""From the server's JSON to the values of results.py. Pure; knows no HTTP library.

Tolerant of what is absent, since servers of this API differ in it, but not of wrong types:
those raise ProtocolError, as does an answer without choices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from penstock_client.errors import ProtocolError
from penstock_client.exchange import JSONObject, Reply
from penstock_client.results import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChoice,
    CompletionChunk,
    Delta,
    Health,
    Message,
    Model,
    TokenLogprob,
    Usage,
)

T = TypeVar("T")
D = TypeVar("D")


def _traceable(parse: Callable[[Reply], T]) -> Callable[[Reply], T]:
    """Let the ProtocolErrors of `parse` name the request, for whoever reads the server's log."""

    @functools.wraps(parse)
    def parse_traceably(reply: Reply) -> T:
        try:
            return parse(reply)
        except ProtocolError as error:
            error.request_id = reply.request_id
            raise

    return parse_traceably


@_traceable
def parse_completion(reply: Reply) -> Completion:
    data = reply.json_object()
    return Completion(
        id=_get(data, "id", str, ""),
        model=_get(data, "model", str, ""),
        created=_get(data, "created", int, 0),
        choices=tuple(_completion_choice(choice) for choice in _answers(data)),
        usage=_usage(data),
        request_id=reply.request_id,
        raw=data,
    )


@_traceable
def parse_chat_completion(reply: Reply) -> ChatCompletion:
    data = reply.json_object()
    return ChatCompletion(
        id=_get(data, "id", str, ""),
        model=_get(data, "model", str, ""),
        created=_get(data, "created", int, 0),
        choices=tuple(_chat_choice(choice) for choice in _answers(data)),
        usage=_usage(data),
        request_id=reply.request_id,
        raw=data,
    )


def parse_completion_chunk(data: JSONObject) -> CompletionChunk:
    return CompletionChunk(
        id=_get(data, "id", str, ""),
        model=_get(data, "model", str, ""),
        choices=tuple(_completion_choice(choice) for choice in _objects(data, "choices")),
        usage=_usage(data),
        raw=data,
    )


def parse_chat_chunk(data: JSONObject) -> ChatCompletionChunk:
    return ChatCompletionChunk(
        id=_get(data, "id", str, ""),
        model=_get(data, "model", str, ""),
        choices=tuple(_chat_chunk_choice(choice) for choice in _objects(data, "choices")),
        usage=_usage(data),
        raw=data,
    )


@_traceable
def parse_models(reply: Reply) -> tuple[Model, ...]:
    return tuple(
        Model(
            id=_require(model, "id", str),
            created=_get(model, "created", int, 0),
            owned_by=_get(model, "owned_by", str, ""),
            max_model_len=_get(model, "max_model_len", int, None),
            root=_get(model, "root", str, None),
            raw=model,
        )
        for model in _objects(reply.json_object(), "data")
    )


def only_model(models: tuple[Model, ...]) -> str:
    """The first name of the server's only model. Raises ValueError if there is a choice to make."""
    if not models:
        raise ProtocolError("the server lists no model")
    if len({model.root or model.id for model in models}) > 1:
        names = ", ".join(model.id for model in models)
        raise ValueError(f"the server has {len(models)} models, choose one with model=: {names}")
    return models[0].id


@_traceable
def parse_health(reply: Reply) -> Health:
    """For a 200 and a 503, whose bodies may also be empty or plain text."""
    try:
        data = reply.json_object()
    except ProtocolError:
        data = {}
    error = data.get("error")
    details = error if isinstance(error, dict) else {}
    return Health(
        status=_get(data, "status", str, "ok" if reply.is_success else "unavailable"),
        is_ready=reply.is_success,
        progress=_progress({**details, **data}),
        message=_get({**details, **data}, "message", str, None),
        raw=data,
    )


def _progress(data: JSONObject) -> float | None:
    progress = _number(data, "progress")
    loaded, total = _get(data, "loaded_layers", int, None), _get(data, "total_layers", int, None)
    if progress is None and loaded is not None and total:
        progress = loaded / total
    return progress


def _completion_choice(choice: JSONObject) -> CompletionChoice:
    return CompletionChoice(
        index=_get(choice, "index", int, 0),
        text=_require(choice, "text", str),
        finish_reason=_get(choice, "finish_reason", str, None),
        logprobs=_completion_logprobs(_get(choice, "logprobs", dict, None)),
        raw=choice,
    )


def _chat_choice(choice: JSONObject) -> ChatChoice:
    message = _require(choice, "message", dict)
    return ChatChoice(
        index=_get(choice, "index", int, 0),
        message=Message(
            role=_get(message, "role", str, "assistant"),
            content=_get(message, "content", str, None),
            raw=message,
        ),
        finish_reason=_get(choice, "finish_reason", str, None),
        logprobs=_chat_logprobs(_get(choice, "logprobs", dict, None)),
        raw=choice,
    )


def _chat_chunk_choice(choice: JSONObject) -> ChatChunkChoice:
    delta = _require(choice, "delta", dict)
    return ChatChunkChoice(
        index=_get(choice, "index", int, 0),
        delta=Delta(
            role=_get(delta, "role", str, None),
            content=_get(delta, "content", str, None),
            raw=delta,
        ),
        finish_reason=_get(choice, "finish_reason", str, None),
        logprobs=_chat_logprobs(_get(choice, "logprobs", dict, None)),
        raw=choice,
    )


def _usage(data: JSONObject) -> Usage | None:
    usage = _get(data, "usage", dict, None)
    if usage is None:
        return None
    prompt, completion = (
        _get(usage, name, int, 0) for name in ("prompt_tokens", "completion_tokens")
    )
    details: JSONObject = _get(usage, "prompt_tokens_details", dict, {})
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=_get(usage, "total_tokens", int, prompt + completion),
        cached_tokens=_get(details, "cached_tokens", int, 0),
        raw=usage,
    )


def _completion_logprobs(logprobs: JSONObject | None) -> tuple[TokenLogprob, ...] | None:
    """Parallel lists, one entry per token; `top_logprobs` maps rivals to log probabilities."""
    if logprobs is None:
        return None
    tokens: list[Any] = _get(logprobs, "tokens", list, [])
    values: list[Any] = _get(logprobs, "token_logprobs", list, [])
    tops: list[Any] = _get(logprobs, "top_logprobs", list, []) or [None] * len(tokens)
    if not len(tokens) == len(values) == len(tops):
        raise ProtocolError("the lists in 'logprobs' differ in length")
    entries = (
        {"token": token, "logprob": value, "top_logprobs": top}
        for token, value, top in zip(tokens, values, tops, strict=True)
    )
    return tuple(
        _token_logprob(
            entry,
            [
                {"token": token, "logprob": logprob}
                for token, logprob in _get(entry, "top_logprobs", dict, {}).items()
            ],
        )
        for entry in entries
    )


def _chat_logprobs(logprobs: JSONObject | None) -> tuple[TokenLogprob, ...] | None:
    """One object per token, each with the list of its rivals."""
    if logprobs is None:
        return None
    return tuple(
        _token_logprob(entry, _objects(entry, "top_logprobs"))
        for entry in _objects(logprobs, "content")
    )


def _token_logprob(entry: JSONObject, rivals: list[JSONObject]) -> TokenLogprob:
    return TokenLogprob(
        token=_require(entry, "token", str),
        logprob=_number(entry, "logprob"),
        top_logprobs=tuple(_token_logprob(rival, []) for rival in rivals),
    )


def _answers(data: JSONObject) -> list[JSONObject]:
    choices = _objects(data, "choices")
    if not choices:
        raise ProtocolError(f"the answer has no choices: {data!r:.200}")
    return choices


def _objects(data: JSONObject, name: str) -> list[JSONObject]:
    """The list of objects under `name`; empty if absent."""
    values: list[Any] = _get(data, name, list, [])
    for value in values:
        if not isinstance(value, dict):
            raise ProtocolError(f"{name!r} should hold objects, not {value!r:.100}")
    return values


def _require(data: JSONObject, name: str, kind: type[T]) -> T:
    value = _get(data, name, kind, None)
    if value is None:
        raise ProtocolError(f"{name!r} is missing in {data!r:.200}")
    return value


def _number(data: JSONObject, name: str) -> float | None:
    value = data.get(name)
    return float(value) if isinstance(value, int) else _get(data, name, float, None)


def _get(data: JSONObject, name: str, kind: type[T], default: D) -> T | D:
    """What is under `name`; `default` if it is absent or null. Raises ProtocolError."""
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise ProtocolError(f"{name!r} should be {kind.__name__}, not {value!r:.100}")
    return value
