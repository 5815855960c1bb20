"""The bodies of requests to /v1/messages and /v1/messages/count_tokens, Anthropic's API. The rules are those
of protocol/requests.py. Accepted without effect:

    metadata, service_tier, inference_geo, speed, user_profile_id, diagnostics      accounting at Anthropic
    cache_control, also of blocks and tools      keys and values are kept anyway while there is room
    context_management      what a client wants to be left out of long prompts; they go to the model as sent
    thinking.display, thinking.signature      the thinking of this server's models is never hidden
    citations, caller      members of blocks that earlier answers had
    eager_input_streaming, defer_loading, allowed_callers, input_examples (of tools)      hints

Tools that Anthropic runs itself, or whose schema only its models know (web_search_20250305, ...), are left
out and named in the header X-Penstock-Ignored; --refuse-unsupported-tools refuses them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
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

from penstock_server.anthropic_api.content_blocks import InputMessage, OtherBlock, Texts, combined, text_of
from penstock_server.protocol.conversation import (
    Conversation,
    ToolMode,
    ToolOffer,
    Turn,
    template_kwargs,
    wrong_call,
)
from penstock_server.protocol.generation_fields import MAX_STOP_STRINGS, CacheSalt, Priority, RequestId
from penstock_server.protocol.other_parts import leniency_of, with_text
from penstock_server.protocol.output_formats import JsonSchemaFormat, NamedSchema
from penstock_server.protocol.requests import MAX_MESSAGES, ChatCompletionRequest
from penstock_server.protocol.tools import MAX_TOOLS_ELSEWHERE, Function, FunctionName, check_schema
from penstock_server.protocol.wire import (
    MAX_INT,
    PositiveCount,
    Text,
    Unsupported,
    Wire,
    invalid,
)


class CustomTool(Wire):
    """A function of the client's."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: Annotated[dict[str, Any], AfterValidator(check_schema)]
    strict: bool | None = Field(None, description="With tool_choice auto: calls must follow the schema.")

    # accepted without effect
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    input_examples: list[Any] | None = None

    @property
    def function(self) -> Function:
        return Function(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )


class OtherTool(BaseModel):
    """A tool that Anthropic runs, or whose schema only its models know."""

    model_config = ConfigDict(extra="allow")

    type: str


def _kind_of_tool(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "custom" if kind in (None, "custom") else "other"


AnyTool = Annotated[
    Annotated[CustomTool, Tag("custom")] | Annotated[OtherTool, Tag("other")], Discriminator(_kind_of_tool)
]

_MODES: dict[str, ToolMode] = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


class MessagesToolChoice(Wire):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = Field(None, description="true: one call at most")

    @model_validator(mode="after")
    def _check_name(self) -> MessagesToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise invalid("tool_choice.name", "the type 'tool', and no other, has a name")
        return self


class Thinking(Wire):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: PositiveCount | None = Field(None, description="The most tokens of thinking.")
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Wire):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Wire):
    effort: Text | None = Field(None, description="For the model's chat template.")
    format: OutputFormat | None = Field(None, description="What the answer must be.")


class PromptRequest(Wire):
    """Body of POST /v1/messages/count_tokens, and what /v1/messages has in common with it."""

    model: str | None = Field(None, description="A name that /v1/models lists; may be left out.")
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Texts | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS_ELSEWHERE)] | None = None
    tool_choice: MessagesToolChoice | None = Field(None, description="auto if null and there are tools")
    thinking: Thinking | None = Field(None, description="Whether the model thinks first, if it can.")
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="Former place of output_config.format.")

    # as on the other routes
    chat_template_kwargs: dict[str, Text | bool | int | float] | None = None

    # not supported
    container: Unsupported = None
    mcp_servers: Unsupported = None
    thread: Unsupported = None
    compaction: Unsupported = None
    fallbacks: Unsupported = None

    # accepted without effect
    betas: list[str] | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    speed: str | None = None
    user_profile_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_system(cls, body: Any, info: ValidationInfo) -> Any:
        if not isinstance(body, dict) or not isinstance(system := body.get("system"), list):
            return body
        return body | {"system": with_text(system, ("text",), "text", leniency_of(info))}

    @model_validator(mode="after")
    def _check_messages(self) -> PromptRequest:
        for index, message in enumerate(self.messages):
            if (block := message.misplaced) is not None:
                reason = f"a message of the {message.role} has no place for such a block"
                raise invalid(f"messages.{index}.content.{block}.type", reason)
        conversation = self.as_conversation
        conversation.tools.check()
        if (wrong := wrong_call(conversation.turns)) is None:
            return self
        if wrong.is_result:
            raise invalid("messages", f"there is a result of {wrong.call_id!r}, and no call before it")
        raise invalid("messages", f"two calls of one message have the id {wrong.call_id!r}")

    @property
    def unsupported_tools(self) -> list[str]:
        """Tools that the model does not see, by place and type."""
        tools = enumerate(self.tools or ())
        return [f"tools.{index} ({tool.type})" for index, tool in tools if isinstance(tool, OtherTool)]

    @property
    def unsupported_blocks(self) -> list[str]:
        """Blocks that the model does not see, by place and type."""
        return [
            f"messages.{number}.content.{index} ({block.type})"
            for number, message in enumerate(self.messages)
            if not isinstance(message.content, str)
            for index, block in enumerate(message.content)
            if isinstance(block, OtherBlock)
        ]

    @property
    def format(self) -> OutputFormat | None:
        """The form that the answer must have."""
        return (self.output_config and self.output_config.format) or self.output_format

    @cached_property
    def as_conversation(self) -> Conversation:
        turns = [Turn("system", text)] if (text := text_of(self.system or "")) else []
        turns = combined([*turns, *(turn for message in self.messages for turn in message.turns)])
        goes_on = turns[-1].role == "assistant"
        if goes_on and turns[-1].calls:
            raise invalid("messages", "the last message has calls; send their results after it")
        return Conversation(
            tuple(turns),
            self._tool_offer,
            template_kwargs(
                self.output_config.effort if self.output_config else None, None, self._template_kwargs
            ),
            not goes_on,
            goes_on,
            self._thinking_budget,
        )

    @property
    def _thinking_budget(self) -> int | None:
        """The most tokens of the thinking; None: no limit."""
        if self.thinking is None:
            return None
        return 0 if self.thinking.type == "disabled" else self.thinking.budget_tokens

    @property
    def _template_kwargs(self) -> dict[str, Any]:
        thinking = {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}
        return thinking | (self.chat_template_kwargs or {})

    @property
    def _tool_offer(self) -> ToolOffer:
        own = {
            f"tools.{at}": tool for at, tool in enumerate(self.tools or ()) if isinstance(tool, CustomTool)
        }
        offer = ToolOffer(tuple(tool.function for tool in own.values()), "auto", places=tuple(own))
        if (choice := self.tool_choice) is None:
            return offer
        names = frozenset({choice.name}) if choice.name else frozenset[str]()
        is_parallel = not choice.disable_parallel_tool_use
        return replace(offer, mode=_MODES[choice.type], names=names, is_parallel=is_parallel)


class MessagesRequest(PromptRequest):
    """Body of POST /v1/messages."""

    max_tokens: PositiveCount = Field(
        description="The most tokens of the answer; fewer if the context has no room for so many."
    )
    stop_sequences: (
        Annotated[list[Annotated[Text, Field(min_length=1)]], Field(max_length=MAX_STOP_STRINGS)] | None
    ) = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    stream: bool | None = None

    # as on the other routes
    request_id: RequestId | None = Field(None, description="Part of the answer's id.")
    priority: Priority | None = Field(None, description="Lower runs earlier.")
    cache_salt: CacheSalt | None = Field(
        None, description="Only prompts with the same salt share computed keys and values."
    )
    speculation: bool | None = Field(
        None, description="false: no guesses of the answer's tokens are computed ahead."
    )

    # accepted without effect
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None

    @cached_property
    def as_chat(self) -> ChatCompletionRequest:
        """The same request to /v1/chat/completions."""
        form = self.format
        schema = form and JsonSchemaFormat(
            type="json_schema", json_schema=NamedSchema(schema=form.json_schema)
        )
        return ChatCompletionRequest.of(
            self.as_conversation,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stream=self.stream,
            response_format=schema,
            priority=self.priority,
            cache_salt=self.cache_salt,
            speculation=self.speculation,
        )
