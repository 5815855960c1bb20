"""What clients may send to POST /v1/responses. The rules are those of protocol.py; accepted without effect:

    store      nothing is stored, so that previous_response_id, conversation and background are refused
    user, safety_identifier, service_tier      accounting at OpenAI
    prompt_cache_key, prompt_cache_options, prompt_cache_retention, prompt_cache_breakpoint      hints
    max_tool_calls      counts calls of OpenAI's own tools
    include      but for message.output_text.logprobs: what the others add to, there is none of here
    reasoning.summary, reasoning.generate_summary      there are no summaries
    id, status, phase, annotations, logprobs of input items      what answers of ours carry
    stream_options.include_obfuscation      padding against eavesdroppers; we send none

`metadata` comes back in the answer, as at OpenAI.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock.generation.sequence import MAX_LOGPROBS
from penstock_server.messages import MAX_PARTS, Message
from penstock_server.output_formats import JsonObjectFormat, TextFormat
from penstock_server.protocol import (
    MAX_MESSAGES,
    CacheSalt,
    ChatCompletionRequest,
    Priority,
    RequestId,
    SamplingFields,
    Verbosity,
)
from penstock_server.tools.request import MAX_TOOLS, Function, FunctionName, FunctionType, TypedTool
from penstock_server.wire import Only, PositiveCount, Text, Unsupported, Wire, invalid

LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Role = Literal["system", "developer", "user", "assistant"]
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")


def _refuse_state(value: object) -> None:
    if value not in (None, False, ""):
        message = "this server keeps no responses: send the whole conversation as input"
        raise PydanticCustomError("unsupported_parameter", "{message}", {"message": message})


#: A field about what OpenAI has stored.
Stored = Annotated[None, PlainValidator(_refuse_state), WithJsonSchema({"type": "null"})]


def _known(kind: str, *names: str) -> BeforeValidator:
    """Refuses other names of a `type` and says so."""

    def check(value: object) -> object:
        if isinstance(value, str) and value not in names:
            message = f"{value!r} {kind} are not supported by this server; it takes {', '.join(names)}"
            raise PydanticCustomError("unsupported_content", "{message}", {"message": message})
        return value

    return BeforeValidator(check)


class InputPart(Wire):
    """A piece of an item: text of the client's, or the assistant's as it came."""

    type: Annotated[
        Literal["input_text", "output_text", "refusal"],
        _known("parts", "input_text", "output_text", "refusal"),
    ]
    text: Text | None = None
    refusal: Text | None = None

    # accepted without effect
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_text(self) -> InputPart:
        is_refusal = self.type == "refusal"
        if (self.text is None) != is_refusal or (self.refusal is None) == is_refusal:
            raise PydanticCustomError("invalid_part", "a part needs what its type names, and nothing else")
        return self

    @property
    def content(self) -> str:
        return self.text or self.refusal or ""


def _kind_of_content(value: object) -> str:
    return "list" if isinstance(value, list) else "string"


Content = Annotated[
    Annotated[Text, Tag("string")] | Annotated[list[InputPart], Field(max_length=MAX_PARTS), Tag("list")],
    Discriminator(_kind_of_content),
]


class InputMessage(Wire):
    """One turn."""

    type: Annotated[Literal["message"] | None, _known("items", *ITEM_TYPES)] = None
    role: Role
    content: Content

    # accepted without effect
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCall(Wire):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: Annotated[Text, Field(min_length=1)]
    name: Annotated[Text, Field(min_length=1)]
    arguments: Text

    # accepted without effect
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class FunctionCallOutput(Wire):
    """What the client's function returned."""

    type: Literal["function_call_output"]
    call_id: Annotated[Text, Field(min_length=1)]
    output: Content

    # accepted without effect
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class ReasoningPart(Wire):
    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ReasoningItem(Wire):
    """What an earlier answer thought: the reasoning_content of the assistant's message that follows."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] | None = Field(
        None, description="Counts where there is no content."
    )
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] | None = None
    encrypted_content: Unsupported = None

    # accepted without effect
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary or ())


def _kind_of_item(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in ITEM_TYPES else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind_of_item),
]
Input = Annotated[
    Annotated[Text, Tag("string")]
    | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES), Tag("list")],
    Discriminator(_kind_of_content),
]


def _joined(content: str | list[InputPart]) -> str:
    """Parts joined by line ends, as in chat."""
    return content if isinstance(content, str) else "\n".join(part.content for part in content)


def _is_thought(message: dict[str, Any]) -> bool:
    """Reasoning, and nothing said or called as yet."""
    return "reasoning_content" in message and message["content"] is None and "tool_calls" not in message


def chat_messages(items: Iterable[InputItem]) -> list[dict[str, Any]]:
    """The same as /v1/chat/completions has it: calls are part of the assistant's message before them, and
    reasoning is of the one behind it."""
    messages: list[dict[str, Any]] = []
    for item in items:
        match item:
            case ReasoningItem(text=""):
                pass
            case ReasoningItem() if messages and _is_thought(messages[-1]):
                messages[-1]["reasoning_content"] += "\n" + item.text
            case ReasoningItem():
                messages.append({"role": "assistant", "content": None, "reasoning_content": item.text})
            case FunctionCall():
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            case FunctionCallOutput():
                content = _joined(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            case InputMessage(role="assistant") if messages and _is_thought(messages[-1]):
                messages[-1]["content"] = _joined(item.content)
            case InputMessage():
                messages.append({"role": item.role, "content": _joined(item.content)})
    return messages


class FlatTool(TypedTool, Function):
    """As in chat, with the function's members beside the type."""

    type: FunctionType


class FlatToolRef(Wire):
    type: FunctionType
    name: FunctionName

    @property
    def chat(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name}}


class FlatAllowedTools(Wire):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatToolRef], Field(min_length=1, max_length=MAX_TOOLS)]

    @property
    def chat(self) -> dict[str, Any]:
        tools = [tool.chat for tool in self.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": tools}}


def _kind_of_choice(value: object) -> str:
    if isinstance(value, str):
        return "mode"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "allowed_tools" if kind == "allowed_tools" else "function"


FlatToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[FlatAllowedTools, Tag("allowed_tools")]
    | Annotated[FlatToolRef, Tag("function")],
    Discriminator(_kind_of_choice),
]


class FlatSchemaFormat(Wire):
    """As in response_format, with the schema's members beside the type."""

    type: Literal["json_schema"]
    name: Text
    json_schema: dict[str, Any] = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None


AnswerFormat = Annotated[TextFormat | JsonObjectFormat | FlatSchemaFormat, Field(discriminator="type")]


class TextConfig(Wire):
    format: AnswerFormat | None = Field(None, description="What the answer must be.")
    verbosity: Verbosity | None = Field(None, description="For the model's chat template.")


Summary = Literal["auto", "concise", "detailed"]


class Reasoning(Wire):
    effort: Text | None = Field(None, description="For the model's chat template.")
    summary: Summary | None = None
    generate_summary: Summary | None = None
    context: Annotated[str | None, BeforeValidator(Only("auto"))] = None
    mode: Annotated[str | None, BeforeValidator(Only("standard"))] = None


class ResponseStreamOptions(Wire):
    include_obfuscation: bool | None = None


class ResponsesRequest(SamplingFields):
    """Body of POST /v1/responses."""

    model: str | None = Field(None, description="A name that /v1/models lists; may be left out.")
    input: Input = Field(description="Text, or the messages of a conversation.")
    instructions: Text | None = Field(None, description="A system message in front of the input.")
    max_output_tokens: PositiveCount | None = Field(None, description="Until the context is full if null.")
    include: list[Includable] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: drop the oldest turns that the context has no room for."
    )
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None

    # as on the other routes
    request_id: RequestId | None = Field(None, description="Part of the answer's id.")
    chat_template_kwargs: dict[str, Text | bool | int | float] | None = None
    priority: Priority | None = Field(None, description="Lower runs earlier.")
    cache_salt: CacheSalt | None = Field(
        None, description="Only prompts with the same one share what was computed."
    )

    # not supported
    previous_response_id: Stored = None
    conversation: Stored = None
    background: Stored = None
    prompt: Unsupported = None
    context_management: Unsupported = None
    moderation: Unsupported = None
    image: Unsupported = None
    access_programs: Unsupported = None

    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: FlatToolChoice | None = Field(None, description="auto if null and there are tools")
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")

    metadata: dict[str, str] | None = None

    # accepted without effect
    store: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    max_tool_calls: PositiveCount | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> ResponsesRequest:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "only allowed when stream is true")
        if self.top_logprobs and LOGPROBS not in (self.include or ()):
            raise invalid("top_logprobs", f"only allowed when include has {LOGPROBS!r}")
        if self.tools and self.num_logprobs is not None:
            raise invalid("include", f"{LOGPROBS!r} is not supported together with tools")
        return self

    @model_validator(mode="after")
    def _check_as_chat(self) -> ResponsesRequest:
        """What chat demands of tools and their results, in the words of these fields."""
        try:
            self.chat(self.messages)
        except ValidationError as error:
            first = error.errors()[0]
            found = first.get("ctx", {}).get("param") or next(iter(first["loc"]), "input")
            param = str(found).replace(".function", "")
            name = "input" if param.startswith("messages") else param
            message = first["msg"].replace("message has", "item is").replace(" in its tool_calls", "")
            raise invalid(name, message) from None
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to report per position; None: no log-probabilities at all."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    @cached_property
    def messages(self) -> list[Message]:
        """The conversation as /v1/chat/completions has it."""
        given = self.input
        turns: list[InputItem] = (
            [InputMessage(role="user", content=given)] if isinstance(given, str) else [*given]
        )
        if self.instructions:
            turns = [InputMessage(role="system", content=self.instructions), *turns]
        return [Message.model_validate(message) for message in chat_messages(turns)]

    def chat(self, messages: list[Message]) -> ChatCompletionRequest:
        """The same question about these messages, for whoever renders them."""
        return ChatCompletionRequest.model_validate(
            {
                "messages": messages,
                "reasoning_effort": self.reasoning.effort if self.reasoning else None,
                "verbosity": self.text.verbosity if self.text else None,
                "chat_template_kwargs": self.chat_template_kwargs,
                "response_format": self._response_format,
                "tools": self.tools and [_nested(tool) for tool in self.tools],
                "tool_choice": getattr(self.tool_choice, "chat", self.tool_choice),
                "parallel_tool_calls": self.parallel_tool_calls,
            }
        )

    @property
    def _response_format(self) -> dict[str, Any] | None:
        form = self.text and self.text.format
        if not form:
            return None
        members = form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        return {"type": form.type} | ({"json_schema": members} if form.type == "json_schema" else members)


def _nested(tool: FlatTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"})}
