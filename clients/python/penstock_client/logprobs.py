"""Log probabilities from the server's JSON, which has three shapes for them. Pure."""

from __future__ import annotations

from typing import Any

from penstock_client.errors import ProtocolError
from penstock_client.exchange import JSONObject
from penstock_client.fields import get, number, objects, require
from penstock_client.results import PromptLogprob, PromptLogprobs, TokenLogprob


def completion_logprobs(logprobs: JSONObject | None) -> tuple[TokenLogprob, ...] | None:
    """From parallel lists with one entry per token; `top_logprobs` maps rivals to log probabilities."""
    if logprobs is None:
        return None
    tokens: list[Any] = get(logprobs, "tokens", list, [])
    values: list[Any] = get(logprobs, "token_logprobs", list, [])
    tops: list[Any] = get(logprobs, "top_logprobs", list, []) or [None] * len(tokens)
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
                for token, logprob in get(entry, "top_logprobs", dict, {}).items()
            ],
        )
        for entry in entries
    )


def chat_logprobs(logprobs: JSONObject | None) -> tuple[TokenLogprob, ...] | None:
    """From one object per token, each with the list of its rivals."""
    if logprobs is None:
        return None
    return tuple(
        _token_logprob(entry, objects(entry, "top_logprobs")) for entry in objects(logprobs, "content")
    )


def prompt_logprobs(data: JSONObject) -> PromptLogprobs | None:
    """From vLLM's shape: for each position an object by token id, or null."""
    positions: list[Any] | None = get(data, "prompt_logprobs", list, None)
    if positions is None:
        return None
    return tuple(None if position is None else _ranked(position) for position in positions)


def _ranked(position: object) -> dict[int, PromptLogprob]:
    if not isinstance(position, dict):
        raise ProtocolError(f"'prompt_logprobs' should hold dict, not {position!r:.100}")
    try:
        return {int(token_id): _prompt_logprob(entry) for token_id, entry in position.items()}
    except (ValueError, AttributeError) as error:
        raise ProtocolError(f"'prompt_logprobs' holds {position!r:.100}") from error


def _prompt_logprob(entry: JSONObject) -> PromptLogprob:
    logprob = number(entry, "logprob")
    if logprob is None:
        raise ProtocolError(f"'logprob' is missing in {entry!r:.100}")
    rank, text = get(entry, "rank", int, None), get(entry, "decoded_token", str, None)
    return PromptLogprob(logprob=logprob, rank=rank, decoded_token=text)


def _token_logprob(entry: JSONObject, rivals: list[JSONObject]) -> TokenLogprob:
    return TokenLogprob(
        token=require(entry, "token", str),
        logprob=number(entry, "logprob"),
        top_logprobs=tuple(_token_logprob(rival, []) for rival in rivals),
    )
