"""The items of the `input` of /v1/responses (messages, calls, results, reasoning), and the turns that they
make."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock_server.protocol.conversation import Call, Role, Turn
from penstock_server.protocol.messages import TextOrRefusal
from penstock_server.protocol.other_parts import HOW_TO_GO_ON, MAX_PARTS, always_noted, leniency_of, with_text
from penstock_server.protocol.requests import MAX_MESSAGES
from penstock_server.protocol.wire import Text, Wire, kind_of_text

#: Items that the model sees.
ITEM_TYPES = (
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
    "custom_tool_call",
    "custom_tool_call_output",
    "local_shell_call",
    "local_shell_call_output",
    "mcp_call",
)
#: Items that tools of OpenAI's own leave behind: they are left out of the prompt.
OTHER_TYPES = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "tool_search_call",
    "tool_search_output",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "computer_call",
    "computer_call_output",
    "shell_call",
    "shell_call_output",
    "apply_patch_call",
    "apply_patch_call_output",
    "compaction",
)
#: The namespace of functions whose names need no namespace, as in Codex.
_OWN_NAMESPACE = "functions"
#: The most characters of a function's name.
_MAX_NAME_CHARS = 64
_DIGEST_CHARS = 8


def _known(kind: str, *names: str) -> BeforeValidator:
    """A validator of a `type` that refuses other names than `names`."""

    def check(value: object) -> object:
        if isinstance(value, str) and value not in names:
            message = f"{value!r} {kind} are not supported by this server, which takes {', '.join(names)}"
            message += HOW_TO_GO_ON if kind == "parts" else ""
            raise PydanticCustomError("unsupported_content", "{message}", {"message": message})
        return value

    return BeforeValidator(check)


def offered_name(name: str, namespace: str | None) -> str:
    """The name with which the model knows a function of a namespace. A name that would be too long ends with
    a digest of it."""
    if namespace in (None, _OWN_NAMESPACE):
        return name
    whole = f"{namespace}__{name}"
    if len(whole) <= _MAX_NAME_CHARS:
        return whole
    digest = hashlib.sha256(whole.encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{whole[: _MAX_NAME_CHARS - _DIGEST_CHARS - 1]}_{digest}"


class Item(Wire):
    # accepted without effect
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete", "calling", "failed"] | None = None
    internal_chat_message_metadata_passthrough: Any = None


class InputPart(TextOrRefusal):
    """A part of an item: the client's text, or the assistant's text as an earlier answer had it."""

    type: Annotated[
        Literal["input_text", "output_text", "refusal"],
        _known("parts", "input_text", "output_text", "refusal"),
    ]

    # accepted without effect
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = Field(None, description="Without effect; the openai package adds it.")
    prompt_cache_breakpoint: dict[str, Any] | None = None


Content = Annotated[
    Annotated[Text, Tag("string")] | Annotated[list[InputPart], Field(max_length=MAX_PARTS), Tag("list")],
    Discriminator(kind_of_text),
]


_PART_TYPES = ("input_text", "output_text", "refusal")


class InputMessage(Item):
    """One turn."""

    type: Annotated[Literal["message"] | None, _known("items", *ITEM_TYPES)] = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Content | None = Field(None, description="Only an assistant's message may have none.")

    # accepted without effect
    phase: Literal["commentary", "final_answer"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_parts(cls, body: Any, info: ValidationInfo) -> Any:
        if not isinstance(body, dict) or not isinstance(content := body.get("content"), list):
            return body
        return body | {"content": with_text(content, _PART_TYPES, "input_text", leniency_of(info))}

    @model_validator(mode="after")
    def _check_content(self) -> InputMessage:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("missing_content", "content is missing")
        return self


class FunctionCall(Item):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: Annotated[Text, Field(min_length=1)]
    name: Annotated[Text, Field(min_length=1)]
    arguments: Text
    namespace: Text | None = None
    parsed_arguments: Any = Field(None, description="Without effect; the openai package adds it.")

    @property
    def call(self) -> Call:
        return Call(self.call_id, offered_name(self.name, self.namespace), self.arguments)


class CustomToolCall(Item):
    """A call of a tool that takes a text: the model sees a call with the argument `input`."""

    type: Literal["custom_tool_call"]
    call_id: Annotated[Text, Field(min_length=1)]
    name: Annotated[Text, Field(min_length=1)]
    input: Text
    namespace: Text | None = None

    @property
    def call(self) -> Call:
        arguments = json.dumps({"input": self.input}, ensure_ascii=False)
        return Call(self.call_id, offered_name(self.name, self.namespace), arguments)


class McpCall(Item):
    """A call that OpenAI sent to an MCP server, and what came of it: the model sees a call and its result."""

    type: Literal["mcp_call"]
    id: Annotated[Text, Field(min_length=1)]
    name: Annotated[Text, Field(min_length=1)]
    arguments: Text
    server_label: Text | None = None
    output: Text | None = None
    error: Any = None

    # accepted without effect
    approval_request_id: str | None = None

    @property
    def call(self) -> Call:
        return Call(self.id, offered_name(self.name, self.server_label), self.arguments)

    @property
    def result(self) -> str:
        error = self.error if isinstance(self.error, str) else json.dumps(self.error)
        return self.output or (f"Error: {error}" if self.error else "")


class LocalShellCall(Item):
    """A command that an answer of OpenAI's asked for: the model sees a call of `local_shell`."""

    type: Literal["local_shell_call"]
    call_id: Annotated[Text, Field(min_length=1)]
    action: dict[Text, Any]

    @property
    def call(self) -> Call:
        return Call(self.call_id, "local_shell", json.dumps(self.action))


class LocalShellCallOutput(Item):
    """What the client's shell printed. OpenAI's packages name the call by `id`, its guide by `call_id`."""

    type: Literal["local_shell_call_output"]
    call_id: Text | None = None
    output: Text

    @model_validator(mode="after")
    def _check_id(self) -> LocalShellCallOutput:
        if not (self.call_id or self.id):
            raise PydanticCustomError("missing_id", "call_id is missing: the call whose output this is")
        return self

    @property
    def names(self) -> str:
        return self.call_id or self.id or ""


class FunctionCallOutput(Item):
    """What the client's function returned."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Annotated[Text, Field(min_length=1)]
    output: Content

    # accepted without effect
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_parts(cls, body: Any, info: ValidationInfo) -> Any:
        if not isinstance(body, dict) or not isinstance(output := body.get("output"), list):
            return body
        leniency = always_noted(leniency_of(info))
        return body | {"output": with_text(output, _PART_TYPES, "input_text", leniency)}


def _refuse_reference(_: object) -> None:
    raise PydanticCustomError(
        "unsupported_content",
        "this server keeps no items, so none can be referred to; send the item itself",
    )


class OtherItem(BaseModel):
    """What a tool of OpenAI's own left behind."""

    model_config = ConfigDict(extra="allow")

    type: str


class ItemReference(BaseModel):
    """An item that OpenAI keeps; validation always refuses it."""

    type: Annotated[Any, AfterValidator(_refuse_reference)]


class ReasoningPart(Wire):
    type: Literal["reasoning_text", "summary_text", "text"]
    text: Text


class ReasoningItem(Item):
    """The reasoning of an earlier answer. It becomes the reasoning_content of the assistant's next
    message."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] | None = Field(
        None, description="Used if there is no content."
    )
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] | None = None

    # accepted without effect
    encrypted_content: str | None = Field(None, description="Only OpenAI can read it.")

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary or ())


def _kind_of_item(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind in OTHER_TYPES:
        return "other"
    if kind == "custom_tool_call_output":
        return "function_call_output"
    if kind == "item_reference":
        return "item_reference"
    return kind if kind in ITEM_TYPES else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[CustomToolCall, Tag("custom_tool_call")]
    | Annotated[LocalShellCall, Tag("local_shell_call")]
    | Annotated[LocalShellCallOutput, Tag("local_shell_call_output")]
    | Annotated[McpCall, Tag("mcp_call")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_kind_of_item),
]
Input = Annotated[
    Annotated[Text, Tag("string")]
    | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES), Tag("list")],
    Discriminator(kind_of_text),
]


def _joined(content: str | list[InputPart] | None) -> str:
    """The text of a content: parts are joined by line ends, as in chat."""
    return content if isinstance(content, str) else "\n".join(part.content for part in content or ())


@dataclass
class _OpenTurn:
    """A turn to which following items may add."""

    role: Role
    #: None: the turn has no text yet.
    text: str | None = None
    reasoning: str | None = None
    calls: list[Call] = field(default_factory=list)
    call_id: str | None = None

    @property
    def is_thought(self) -> bool:
        """Whether the turn has reasoning, and neither text nor calls yet."""
        return self.reasoning is not None and self.text is None and not self.calls

    def closed(self) -> Turn:
        calls = tuple(self.calls)
        return Turn(self.role, self.text or "", None, self.reasoning, calls, self.call_id)


def turns_of(items: Iterable[InputItem]) -> list[Turn]:
    """The turns that `items` make. Calls belong to the assistant's turn before them, reasoning to the turn
    after it."""
    turns: list[_OpenTurn] = []
    shell_ids: dict[str, str] = {}
    for item in items:
        last = turns[-1] if turns else None
        thought = last if last and last.is_thought else None
        match item:
            case ReasoningItem(text=""):
                pass
            case ReasoningItem() if thought:
                thought.reasoning = f"{thought.reasoning}\n{item.text}"
            case ReasoningItem():
                turns.append(_OpenTurn("assistant", reasoning=item.text))
            case FunctionCall() | CustomToolCall() | LocalShellCall() | McpCall():
                if last is None or last.role != "assistant":
                    turns.append(_OpenTurn("assistant"))
                turns[-1].calls.append(item.call)
                if isinstance(item, LocalShellCall) and item.id:
                    shell_ids[item.id] = item.call_id
                elif isinstance(item, McpCall):
                    turns.append(_OpenTurn("tool", item.result, call_id=item.id))
            case FunctionCallOutput():
                turns.append(_OpenTurn("tool", _joined(item.output), call_id=item.call_id))
            case LocalShellCallOutput():
                call_id = shell_ids.get(item.names, item.names)
                turns.append(_OpenTurn("tool", item.output, call_id=call_id))
            case InputMessage(role="assistant") if thought:
                thought.text = _joined(item.content)
            case InputMessage():
                role: Role = "system" if item.role == "developer" else item.role
                turns.append(_OpenTurn(role, _joined(item.content)))
    return [turn.closed() for turn in turns]
