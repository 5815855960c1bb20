"""Chunks added up to the answer that the server would have given without a stream. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock_client.chunks import (
    ChatChunkChoice,
    ChatCompletionChunk,
    CompletionChunk,
    ToolCallDelta,
)
from penstock_client.errors import ProtocolError
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


@dataclass
class _CallPieces:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def add(self, delta: ToolCallDelta) -> None:
        self.id = self.id or delta.id or ""
        self.name = self.name or delta.name or ""
        self.arguments.append(delta.arguments)


@dataclass
class _ChoicePieces:
    """One choice. logprobs, token_ids: None until a chunk has some."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    role: str = "assistant"
    calls: dict[int, _CallPieces] = field(default_factory=dict)
    logprobs: list[TokenLogprob] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, choice: CompletionChoice | ChatChunkChoice) -> None:
        self.texts.append(choice.text)
        if choice.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += choice.logprobs
        if choice.token_ids is not None:
            self.token_ids = self.token_ids or []
            self.token_ids += choice.token_ids
        self.finish_reason = choice.finish_reason or self.finish_reason
        if choice.stop_reason is not None:
            self.stop_reason = choice.stop_reason
        if isinstance(choice, CompletionChoice):
            self.prompt_token_ids = choice.prompt_token_ids or self.prompt_token_ids
        else:
            self._add_delta(choice)

    def _add_delta(self, choice: ChatChunkChoice) -> None:
        self.role = choice.delta.role or self.role
        self.thoughts.append(choice.delta.reasoning or "")
        for delta in choice.delta.tool_calls:
            self.calls.setdefault(delta.index, _CallPieces()).add(delta)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(
            ToolCall(call.id, call.name, "".join(call.arguments)) for _, call in sorted(self.calls.items())
        )

    def completion_choice(self, index: int) -> CompletionChoice:
        text = "".join(self.texts)
        return CompletionChoice(index, text, self.prompt_token_ids, **self._fields())

    def chat_choice(self, index: int) -> ChatChoice:
        text = "".join(self.texts)
        reasoning = "".join(self.thoughts) or None
        # Content is null if there are calls or reasoning alone, as in an answer that is not streamed.
        content = None if (self.calls or reasoning) and not text else text
        message = Message(self.role, content, self.tool_calls, reasoning)
        return ChatChoice(index, message, **self._fields())

    def _fields(self) -> dict[str, Any]:
        """The fields that every choice has."""
        return {
            "finish_reason": self.finish_reason,
            "logprobs": None if self.logprobs is None else tuple(self.logprobs),
            "stop_reason": self.stop_reason,
            "token_ids": None if self.token_ids is None else tuple(self.token_ids),
        }


class Pieces:
    """The chunks of a stream so far, added up."""

    def __init__(self) -> None:
        self._id = self._model = ""
        self._created = 0
        self._choices: dict[int, _ChoicePieces] = {}
        self._prompt_token_ids: tuple[int, ...] | None = None
        self.usage: Usage | None = None

    def add(self, chunk: CompletionChunk | ChatCompletionChunk) -> None:
        self._id, self._model = chunk.id or self._id, chunk.model or self._model
        self._created = chunk.created or self._created
        self.usage = chunk.usage or self.usage
        if isinstance(chunk, ChatCompletionChunk):
            self._prompt_token_ids = chunk.prompt_token_ids or self._prompt_token_ids
        for choice in chunk.choices:
            self._choices.setdefault(choice.index, _ChoicePieces()).add(choice)

    @property
    def _first(self) -> _ChoicePieces:
        return self._choices.get(0) or _ChoicePieces()

    @property
    def text(self) -> str:
        """The text of choice 0. finish_reason and tool_calls are choice 0's, too."""
        return "".join(self._first.texts)

    @property
    def finish_reason(self) -> str | None:
        return self._first.finish_reason

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self._first.tool_calls

    def completion(self, request_id: str | None) -> Completion:
        """The whole answer. Raises ProtocolError for a stream without choices."""
        choices = tuple(c.completion_choice(index) for index, c in self._sorted(request_id))
        return Completion(self._id, self._model, self._created, choices, self.usage, request_id)

    def chat_completion(self, request_id: str | None) -> ChatCompletion:
        """The whole answer. Raises ProtocolError for a stream without choices."""
        choices = tuple(c.chat_choice(index) for index, c in self._sorted(request_id))
        ids = self._prompt_token_ids
        return ChatCompletion(self._id, self._model, self._created, choices, self.usage, request_id, ids)

    def _sorted(self, request_id: str | None) -> list[tuple[int, _ChoicePieces]]:
        if not self._choices:
            raise ProtocolError("the stream had no choices", request_id=request_id)
        return sorted(self._choices.items())
