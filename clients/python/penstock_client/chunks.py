"""Pieces of a streamed answer, as frozen values; for whole answers see results.py."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_client.exchange import JSONObject
from penstock_client.results import CompletionChoice, TokenLogprob, Usage, raw_field


@dataclass(frozen=True)
class CompletionChunk:
    """A piece of a streamed completion; each choice's `text` is what is new."""

    id: str
    model: str
    choices: tuple[CompletionChoice, ...]
    usage: Usage | None = None
    created: int = 0
    raw: JSONObject = raw_field()

    @property
    def text(self) -> str:
        """What is new in choice 0; empty if this chunk is about another choice, or about usage."""
        return "".join(choice.text for choice in self.choices if choice.index == 0)


@dataclass(frozen=True)
class ToolCallDelta:
    """What is new in the message's call number `index`; the first of each has its id and name."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    raw: JSONObject = raw_field()


@dataclass(frozen=True)
class Delta:
    """What is new in a message; `role` comes with a choice's first chunk."""

    role: str | None = None
    content: str | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()
    raw: JSONObject = raw_field()


@dataclass(frozen=True)
class ChatChunkChoice:
    """What is new in one choice of a streamed chat."""

    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    stop_reason: str | int | None = None
    token_ids: tuple[int, ...] | None = None
    raw: JSONObject = raw_field()

    @property
    def text(self) -> str:
        """The delta's content; empty if it has none."""
        return self.delta.content or ""


@dataclass(frozen=True)
class ChatCompletionChunk:
    """A piece of a streamed chat."""

    id: str
    model: str
    choices: tuple[ChatChunkChoice, ...]
    usage: Usage | None = None
    created: int = 0
    prompt_token_ids: tuple[int, ...] | None = None
    raw: JSONObject = raw_field()

    @property
    def text(self) -> str:
        """What is new in choice 0; empty if this chunk is about another choice, or about usage."""
        return "".join(choice.text for choice in self.choices if choice.index == 0)
