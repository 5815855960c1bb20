"""The messages of chat requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from penstock_server.protocol.conversation import Call, Turn
from penstock_server.protocol.other_parts import (
    HOW_TO_GO_ON,
    MAX_PARTS,
    always_noted,
    leniency_of,
    note,
    with_text,
)
from penstock_server.protocol.tools import Deprecated, ToolCall
from penstock_server.protocol.wire import Count, Text, Unsupported, Wire, kind_of_text


def _check_part_type(value: object) -> object:
    if isinstance(value, str) and value not in ("text", "refusal"):
        message = f"{value!r} parts are not supported by this server, which takes text{HOW_TO_GO_ON}"
        raise PydanticCustomError("unsupported_content", "{message}", {"message": message})
    return value


class TextOrRefusal(Wire):
    """A part of a message: a text or a refusal. `type` names the member that the part has."""

    type: str
    text: Text | None = None
    refusal: Text | None = None

    @model_validator(mode="after")
    def _check_text(self) -> TextOrRefusal:
        is_refusal = self.type == "refusal"
        if (self.text is None) != is_refusal or (self.refusal is None) == is_refusal:
            raise PydanticCustomError(
                "invalid_part", "a part needs the member that its type names, and no other"
            )
        return self

    @property
    def content(self) -> str:
        return self.text or self.refusal or ""


class ContentPart(TextOrRefusal):
    """A part of a chat message: text, or an assistant's refusal."""

    type: Annotated[Literal["text", "refusal"], BeforeValidator(_check_part_type)]

    # accepted without effect
    prompt_cache_breakpoint: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None


MessageContent = Annotated[
    Annotated[Text, Tag("string")] | Annotated[list[ContentPart], Field(max_length=MAX_PARTS), Tag("list")],
    Discriminator(kind_of_text),
]


def text_of(content: str | list[ContentPart] | None) -> str:
    """The text of a content; parts are joined by line ends, as in vLLM."""
    return content if isinstance(content, str) else "\n".join(part.content for part in content or ())


class Prediction(Wire):
    """OpenAI's predicted output: a text that the answer may resemble. It makes an answer faster, and changes
    nothing of it."""

    type: Literal["content"]
    content: MessageContent

    @property
    def text(self) -> str:
        return (
            self.content if isinstance(self.content, str) else "".join(part.content for part in self.content)
        )


class ThinkingField(Wire):
    """Anthropic's field for the thinking before an answer. adaptive: the model decides."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None

    @property
    def is_enabled(self) -> bool | None:
        return None if self.type == "adaptive" else self.type == "enabled"

    @property
    def budget(self) -> int | None:
        return 0 if self.type == "disabled" else self.budget_tokens


class Message(Wire):
    """A message of a chat. A client may send an answer's message back as it came: fields that can't be shown
    to the model must be empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: MessageContent | None = None
    name: Text | None = None
    reasoning_content: Text | None = Field(None, description="For the model's chat template.")
    reasoning: Text | None = Field(None, description="Another name of reasoning_content.")
    refusal: Text | None = Field(None, description="Used as content if there is none.")
    audio: Unsupported = None
    provider_specific_fields: Any = Field(None, description="Without effect; LiteLLM adds it.")
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_PARTS)] | None = Field(
        None, description="The calls that an assistant made."
    )
    tool_call_id: Text | None = Field(None, description="The call whose result a tool's message is.")
    function_call: Deprecated = None

    # accepted without effect
    annotations: list[Any] | None = None
    cache_control: dict[str, Any] | None = None
    reasoning_details: list[Any] | None = None
    thinking_blocks: list[Any] | None = Field(None, description="Without effect; LiteLLM adds it.")
    parsed: Any = Field(None, description="Without effect; the openai package adds it.")

    @model_validator(mode="before")
    @classmethod
    def _read_parts(cls, body: Any, info: ValidationInfo) -> Any:
        if not isinstance(body, dict):
            return body
        leniency = leniency_of(info)
        if body.get("role") == "assistant":  # an answer's images, of LiteLLM's; a user's would be unknown
            body = {name: value for name, value in body.items() if name != "images"}
        if body.get("audio") and leniency.is_lenient:  # a spoken answer, which has an id alone
            leniency.left_out["audio"] += 1
            body = body | {"audio": None, "content": body.get("content") or note("audio")}
        if not isinstance(content := body.get("content"), list):
            return body
        leniency = always_noted(leniency) if body.get("role") == "tool" else leniency
        return body | {"content": with_text(content, ("text", "refusal"), "text", leniency)}

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("missing_content", "content is missing")
        parts = self.content if isinstance(self.content, list) else []
        has_refusal = self.refusal or any(part.type == "refusal" for part in parts)
        if has_refusal and self.role != "assistant":
            raise PydanticCustomError("unsupported_content", "only an assistant's message can be a refusal")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("misplaced_calls", "only an assistant's message has tool_calls")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise PydanticCustomError("misplaced_id", "a tool's message, and no other, has a tool_call_id")
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return text_of(self.content) or self.refusal or ""

    @property
    def turn(self) -> Turn:
        """The message as a turn. The role "developer" becomes "system", since chat templates know no
        developers."""
        return Turn(
            "system" if self.role == "developer" else self.role,
            self.text,
            self.name,
            self.reasoning_content or self.reasoning,
            tuple(
                Call(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ()
            ),
            self.tool_call_id,
        )
