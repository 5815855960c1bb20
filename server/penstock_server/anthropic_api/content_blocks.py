"""The messages of /v1/messages: blocks of text, thinking, calls and results, and the turns that they make."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock_server.protocol.conversation import Call, Role, Turn
from penstock_server.protocol.other_parts import HOW_TO_GO_ON, MAX_PARTS, always_noted, leniency_of, with_text
from penstock_server.protocol.tools import MAX_DEPTH, is_too_deep
from penstock_server.protocol.wire import Text, Wire, kind_of_text

#: What Claude Code puts in front of the system's text, for Anthropic's accounts. The line differs from
#: request to request, so that no prompt would begin like the one before.
_BILLING_LINE = "x-anthropic-billing-header:"


class Block(Wire):
    # accepted without effect
    cache_control: dict[str, Any] | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: Text

    # accepted without effect
    citations: list[Any] | None = None


class ThinkingBlock(Block):
    """The reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: Text

    # accepted without effect
    signature: str | None = None


class RedactedThinkingBlock(Block):
    """Reasoning that only Anthropic can read; the model does not see it."""

    type: Literal["redacted_thinking"]
    data: str


def _check_input(value: dict[str, Any]) -> dict[str, Any]:
    if is_too_deep(value):
        raise PydanticCustomError("invalid_value", "nests deeper than {levels} levels", {"levels": MAX_DEPTH})
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise PydanticCustomError("invalid_text", "has half a surrogate pair, or no number") from None
    return value


class ToolUseBlock(Block):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: Annotated[Text, Field(min_length=1)]
    name: Annotated[Text, Field(min_length=1)]
    input: Annotated[dict[str, Any], AfterValidator(_check_input)]

    # accepted without effect
    caller: dict[str, Any] | None = None

    @property
    def call(self) -> Call:
        return Call(self.id, self.name, json.dumps(self.input, ensure_ascii=False))


def _refuse_block(kind: object) -> None:
    message = (
        f"{kind!r} blocks are not supported by this server, which takes text, calls and their results"
        f"{HOW_TO_GO_ON}"
    )
    raise PydanticCustomError("unsupported_content", "{message}", {"message": message})


class UnknownBlock(BaseModel):
    """A block of a type that this server can't show to a model; validation always refuses it."""

    type: Annotated[Any, AfterValidator(_refuse_block)]


def _kind_among(*kinds: str, others: Collection[str] = ()) -> Discriminator:
    def kind_of(value: object) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if kind in others:
            return "other"
        return kind if kind in kinds else "unknown"

    return Discriminator(kind_of)


#: A block with a type of its own, or the refusal of another type.
ResultBlock = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[UnknownBlock, Tag("unknown")], _kind_among("text")
]
Texts = Annotated[
    Annotated[Text, Tag("string")] | Annotated[list[ResultBlock], Field(max_length=MAX_PARTS), Tag("list")],
    Discriminator(kind_of_text),
]


class ToolResultBlock(Block):
    """What the client's tool returned."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[Text, Field(min_length=1)]
    content: Texts | None = None
    is_error: bool | None = Field(None, description="true: the model sees 'Error: ' in front of the content.")

    @model_validator(mode="before")
    @classmethod
    def _read_blocks(cls, body: Any, info: ValidationInfo) -> Any:
        if not isinstance(body, dict) or not isinstance(content := body.get("content"), list):
            return body
        return body | {"content": with_text(content, ("text",), "text", always_noted(leniency_of(info)))}

    @property
    def turn(self) -> Turn:
        text = text_of(self.content or "")
        return Turn("tool", f"Error: {text}" if self.is_error else text, call_id=self.tool_use_id)


_BLOCK_TYPES = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
#: Blocks that tools of Anthropic's own leave behind in an answer: they are left out of the prompt.
_OTHER_TYPES = (
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "advisor_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
    "compaction",  # without a summary: one that failed
)


class OtherBlock(BaseModel):
    """What a tool of Anthropic's own left behind."""

    model_config = ConfigDict(extra="allow")

    type: str


AnyBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[OtherBlock, Tag("other")]
    | Annotated[UnknownBlock, Tag("unknown")],
    _kind_among(*_BLOCK_TYPES, others=_OTHER_TYPES),
]


class InputMessage(Wire):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[Text, Tag("string")] | Annotated[list[AnyBlock], Field(max_length=MAX_PARTS), Tag("list")],
        Discriminator(kind_of_text),
    ]

    @model_validator(mode="before")
    @classmethod
    def _read_blocks(cls, body: Any, info: ValidationInfo) -> Any:
        if not isinstance(body, dict) or not isinstance(content := body.get("content"), list):
            return body
        known = {*_BLOCK_TYPES, *_OTHER_TYPES} - {"compaction"}
        return body | {"content": with_text(content, known, "text", leniency_of(info))}

    @property
    def turns(self) -> list[Turn]:
        if isinstance(self.content, str):
            return [Turn(self.role, self.content)]
        if self.role == "assistant":
            return [_assistant_turn(self.content)]
        return list(_user_turns(self.role, self.content))

    @property
    def misplaced(self) -> int | None:
        """The number of the first block that has no place in a message of this role."""
        allowed: tuple[type[BaseModel], ...] = (TextBlock,)
        if self.role == "assistant":
            allowed += (ThinkingBlock, RedactedThinkingBlock, ToolUseBlock, OtherBlock)
        elif self.role == "user":
            allowed += (ToolResultBlock,)
        blocks = [] if isinstance(self.content, str) else self.content
        return next((index for index, block in enumerate(blocks) if not isinstance(block, allowed)), None)


def text_of(content: str | Iterable[Any]) -> str:
    """The text of blocks, joined by line ends as the parts of a chat message."""
    if isinstance(content, str):
        return content
    texts = [block.text for block in content if isinstance(block, TextBlock)]
    return "\n".join(text for text in texts if not text.startswith(_BILLING_LINE))


def combined(turns: Iterable[Turn]) -> list[Turn]:
    """Turns in which neighbouring turns of one role are one, as at Anthropic."""
    found: list[Turn] = []
    for turn in turns:
        last = found[-1] if found else None
        if last is None or turn.role == "tool" or last.role != turn.role:
            found.append(turn)
        else:
            found[-1] = replace(
                last,
                text=_lines(last.text, turn.text),
                reasoning=_lines(last.reasoning or "", turn.reasoning or "") or None,
                calls=last.calls + turn.calls,
            )
    return found


def _lines(*texts: str) -> str:
    return "\n".join(filter(None, texts))


def _assistant_turn(blocks: list[Any]) -> Turn:
    thoughts = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = tuple(block.call for block in blocks if isinstance(block, ToolUseBlock))
    return Turn("assistant", text_of(blocks), reasoning=thoughts or None, calls=calls)


def _user_turns(role: Role, blocks: list[Any]) -> Iterator[Turn]:
    """A turn for each result, and one for the texts between results."""
    texts: list[TextBlock] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            if texts:
                yield Turn(role, text_of(texts))
            texts = []
            yield block.turn
        else:
            texts.append(block)
    if texts or not blocks:
        yield Turn(role, text_of(texts))
