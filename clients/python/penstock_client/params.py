"""The keywords of `complete` and `chat`, each once. Whoever adds one adds it here only.

A keyword that is None or absent is not sent: the server's default holds, which for sampling is
usually what the model's authors recommend.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class SamplingParams(TypedDict, total=False):
    """What completions and chats have in common."""

    #: Name of a model of the server. Default: the server's only one.
    model: str | None
    #: Most tokens to generate. The server's default is 16 for completions and, for chats, what
    #: the context has room for.
    max_tokens: int | None
    #: 0 always takes the most probable token; more is more varied.
    temperature: float | None
    #: Sample among the most probable tokens that make up this probability, in (0, 1].
    top_p: float | None
    #: Sample among this many most probable tokens; 0 or -1 for all.
    top_k: int | None
    #: Leave out tokens less probable than this share of the most probable one's, in [0, 1].
    min_p: float | None
    #: More than 1 discourages tokens that occurred in prompt or answer.
    repetition_penalty: float | None
    #: Subtracted from the logit of each token that occurred in the answer, -2 to 2.
    presence_penalty: float | None
    #: Subtracted from a token's logit for each time that it occurred in the answer, -2 to 2.
    frequency_penalty: float | None
    #: Token id -> what is added to its logit, -100 to 100.
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    #: The same seed with the same parameters gives the same text.
    seed: int | None
    #: The answer ends before the first of these strings.
    stop: str | Sequence[str] | None
    #: How many answers to give; each is a choice of the result.
    n: int | None
    #: Any further fields of the request, sent as they are. Repeating a field is a ValueError.
    extra: Mapping[str, Any] | None


class CompletionParams(SamplingParams, total=False):
    """Keywords of `complete` and `stream_complete`."""

    #: Return each token's log probability, and those of this many most probable rivals.
    logprobs: int | None
    #: Return the prompt in front of the answer.
    echo: bool | None


class ChatParams(SamplingParams, total=False):
    """Keywords of `chat` and `stream_chat`."""

    #: Return each token's log probability.
    logprobs: bool | None
    #: With `logprobs`: also those of this many most probable rivals, 0 to 20.
    top_logprobs: int | None


def check_keywords(method: str, params: Mapping[str, object], known: frozenset[str]) -> None:
    """Raise, for a keyword that is not `known`, the TypeError that Python would raise.

    >>> check_keywords("chat", {"temprature": 1}, frozenset({"temperature"}))
    Traceback (most recent call last):
    TypeError: chat() got an unexpected keyword argument 'temprature'. Did you mean 'temperature'?
    """
    for name in params.keys() - known:
        similar = difflib.get_close_matches(name, known, n=1)
        hint = f". Did you mean {similar[0]!r}?" if similar else "; unmodelled fields go in extra="
        raise TypeError(f"{method}() got an unexpected keyword argument {name!r}{hint}")
