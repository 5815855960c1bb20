"""Pieces of a streamed answer, as frozen values. results.py has whole answers."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Generic, TypeVar

from penstock_client.exchange import JSONObject
from penstock_client.results import Choice, CompletionChoice, Usage, raw_field


@dataclass(frozen=True)
class ToolCallDelta:
    """The new part of a message's call number `index`. The first delta of a call has its id and name."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    raw: JSONObject = raw_field()


@dataclass(frozen=True)
class Delta:
    """The new part of a message. `role` comes with a choice's first chunk."""

    role: str | None = None
    content: str | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()
    #: What the model thinks before it answers.
    reasoning: str | None = None
    raw: JSONObject = raw_field()


@dataclass(frozen=True)
class ChatChunkChoice(Choice):
    """The new part of one choice of a streamed chat."""

    delta: Delta

    @property
    def text(self) -> str:
        """The delta's content; empty if there is none."""
        return self.delta.content or ""


ChunkChoiceT = TypeVar("ChunkChoiceT", CompletionChoice, ChatChunkChoice)


@dataclass(frozen=True)
class Chunk(Generic[ChunkChoiceT]):
    """The fields that the pieces of completions and of chats have in common."""

    id: str
    model: str
    choices: tuple[ChunkChoiceT, ...]
    usage: Usage | None = None
    created: int = 0
    _: KW_ONLY
    raw: JSONObject = raw_field()

    @property
    def text(self) -> str:
        """The new text of choice 0; empty if this chunk is about another choice, or about usage."""
        return "".join(choice.text for choice in self.choices if choice.index == 0)


@dataclass(frozen=True)
class CompletionChunk(Chunk[CompletionChoice]):
    """A piece of a streamed completion. The `text` of a choice is its new text."""


@dataclass(frozen=True)
class ChatCompletionChunk(Chunk[ChatChunkChoice]):
    """A piece of a streamed chat."""

    prompt_token_ids: tuple[int, ...] | None = None
