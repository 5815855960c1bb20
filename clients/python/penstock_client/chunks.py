"""Pieces of a streamed answer, as frozen values; for whole answers see results.py."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Generic, TypeVar

from penstock_client.exchange import JSONObject
from penstock_client.results import Choice, CompletionChoice, Usage, raw_field


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
class ChatChunkChoice(Choice):
    """What is new in one choice of a streamed chat."""

    delta: Delta

    @property
    def text(self) -> str:
        """The delta's content; empty if it has none."""
        return self.delta.content or ""


ChunkChoiceT = TypeVar("ChunkChoiceT", CompletionChoice, ChatChunkChoice)


@dataclass(frozen=True)
class Chunk(Generic[ChunkChoiceT]):
    """What the pieces of completions and of chats have in common."""

    id: str
    model: str
    choices: tuple[ChunkChoiceT, ...]
    usage: Usage | None = None
    created: int = 0
    _: KW_ONLY
    raw: JSONObject = raw_field()

    @property
    def text(self) -> str:
        """What is new in choice 0; empty if this chunk is about another choice, or about usage."""
        return "".join(choice.text for choice in self.choices if choice.index == 0)


@dataclass(frozen=True)
class CompletionChunk(Chunk[CompletionChoice]):
    """A piece of a streamed completion; each choice's `text` is what is new."""


@dataclass(frozen=True)
class ChatCompletionChunk(Chunk[ChatChunkChoice]):
    """A piece of a streamed chat."""

    prompt_token_ids: tuple[int, ...] | None = None
