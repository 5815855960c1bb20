"""The answers of /v1/messages, and the events of their streams."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from penstock_server.answers.streaming import NamedChunk
from penstock_server.protocol.answer_bodies import Usage

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextOut(BaseModel):
    type: Literal["text"] = "text"
    text: str = ""


class ThinkingOut(BaseModel):
    type: Literal["thinking"] = "thinking"
    thinking: str = ""
    #: Anthropic's clients demand this member and send it back; it has no meaning here.
    signature: str = ""


class ToolUseOut(BaseModel):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any] = {}


BlockOut = TextOut | ThinkingOut | ToolUseOut


class OutputTokensDetails(BaseModel):
    thinking_tokens: int


class MessageUsage(BaseModel):
    #: Tokens of the prompt that were computed. Those whose keys and values were kept are counted apart.
    input_tokens: int
    cache_read_input_tokens: int
    #: Anthropic bills tokens that are kept; always 0 here.
    cache_creation_input_tokens: int = 0
    output_tokens: int
    output_tokens_details: OutputTokensDetails

    @classmethod
    def of(cls, usage: Usage) -> MessageUsage:
        cached = usage.prompt_tokens_details.cached_tokens
        return cls(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(
                thinking_tokens=usage.completion_tokens_details.reasoning_tokens
            ),
        )


class MessageBody(BaseModel):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[BlockOut] = []
    #: null until the answer has ended.
    stop_reason: StopReason | None = None
    #: The stop sequence that ended the answer, if one did.
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageEvent(NamedChunk):
    """One event of a streamed message. The client gets the members that are set, and no others."""

    message: dict[str, Any] | None = None
    index: int | None = None
    content_block: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class TokenCount(BaseModel):
    input_tokens: int
