"""The body of a request to /v1/responses. The rules are those of requests.py. Accepted without effect:

    store      nothing is stored; previous_response_id, conversation and background are refused
    user, safety_identifier, service_tier      accounting at OpenAI
    prompt_cache_key, prompt_cache_options, prompt_cache_retention, prompt_cache_breakpoint      hints
    max_tool_calls      counts calls of OpenAI's own tools
    include      except for message.output_text.logprobs; the other values add to items that are never here
    reasoning.summary, reasoning.generate_summary      there are no summaries
    id, status, phase, annotations, logprobs, parsed, parsed_arguments of input items      our own answers
                                            have these fields, or the openai package adds them
    reasoning.context      the chat template says which reasoning of earlier answers the model sees
    stream_options      padding against eavesdroppers, and the order of summaries; we send neither
    client_metadata, access_programs      what Codex tells OpenAI of itself
    defer_loading (of tools), internal_chat_message_metadata_passthrough, encrypted_content (of items)

Functions in a namespace are offered with the namespace in front of their names; calls of them come back with
the namespace apart. Tools of other types (web_search, custom, ...) and the items that such tools leave behind
are left out and named in the header X-Penstock-Ignored; --refuse-unsupported-tools refuses such tools.

`metadata` comes back in the answer, as at OpenAI.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock import MAX_LOGPROBS
from penstock_server.protocol.conversation import (
    Conversation,
    ToolMode,
    ToolOffer,
    Turn,
    template_kwargs,
    wrong_call,
)
from penstock_server.protocol.generation_fields import CacheSalt, Priority, RequestId, SamplingFields
from penstock_server.protocol.input_items import Input, InputMessage, OtherItem, offered_name, turns_of
from penstock_server.protocol.output_formats import AnswerFormat
from penstock_server.protocol.requests import Verbosity
from penstock_server.protocol.tools import (
    MAX_TOOLS,
    Function,
    FunctionName,
    FunctionType,
    TypedTool,
    kind_of_choice,
)
from penstock_server.protocol.wire import Count, Only, PositiveCount, Text, Unsupported, Wire, invalid

#: OpenAI's limits on what comes back in the answer, and in three events of a stream.
Metadata = Annotated[
    dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]], Field(max_length=16)
]
_MAX_USER_CHARS = 512
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


def _refuse_state(value: object) -> None:
    if value not in (None, False, ""):
        message = "this server keeps no responses: send the whole conversation as input"
        raise PydanticCustomError("unsupported_parameter", "{message}", {"message": message})


#: A field that refers to a response or conversation stored at OpenAI.
Stored = Annotated[None, PlainValidator(_refuse_state), WithJsonSchema({"type": "null"})]


class FlatTool(TypedTool, Function):
    """A tool as in chat, with the function's members beside the type."""

    type: FunctionType

    # accepted without effect
    defer_loading: bool | None = Field(default=None, exclude_if=lambda value: value is None)


class OtherTool(BaseModel):
    """A tool that OpenAI runs, or whose calls are no JSON."""

    model_config = ConfigDict(extra="allow")

    type: str


def _kind_of_tool(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind in ("function", "namespace"):
        return str(kind)
    return "other" if isinstance(kind, str) else "function"


class Namespace(Wire):
    """Functions under one name."""

    type: Literal["namespace"]
    name: FunctionName
    description: Text | None = None
    tools: Annotated[
        list[
            Annotated[
                Annotated[FlatTool, Tag("function")]
                | Annotated[OtherTool, Tag("other")]
                | Annotated[OtherTool, Tag("namespace")],
                Discriminator(_kind_of_tool),
            ]
        ],
        Field(max_length=MAX_TOOLS),
    ]


AnyTool = Annotated[
    Annotated[FlatTool, Tag("function")]
    | Annotated[Namespace, Tag("namespace")]
    | Annotated[OtherTool, Tag("other")],
    Discriminator(_kind_of_tool),
]


@dataclass(frozen=True)
class PlacedTool:
    """A tool of a request, which may lie in a namespace."""

    place: str
    tool: FlatTool | OtherTool
    namespace: str | None = None

    @property
    def own_name(self) -> str:
        """The name of a function within its namespace."""
        assert isinstance(self.tool, FlatTool)
        return self.tool.name

    @property
    def offered_name(self) -> str:
        return offered_name(self.own_name, self.namespace)


class FlatToolRef(Wire):
    type: FunctionType
    name: FunctionName


class FlatAllowedTools(Wire):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatToolRef], Field(min_length=1, max_length=MAX_TOOLS)]


FlatToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[FlatAllowedTools, Tag("allowed_tools")]
    | Annotated[FlatToolRef, Tag("function")],
    Discriminator(kind_of_choice),
]


class TextConfig(Wire):
    format: Annotated[AnswerFormat, Field(discriminator="type")] | None = Field(
        None, description="What the answer must be."
    )
    verbosity: Verbosity | None = Field(None, description="For the model's chat template.")


Summary = Literal["auto", "concise", "detailed", "none"]


class Reasoning(Wire):
    effort: Text | None = Field(None, description="For the model's chat template.")
    summary: Summary | None = None
    generate_summary: Summary | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Annotated[str | None, BeforeValidator(Only("standard"))] = None


class ResponseStreamOptions(Wire):
    include_obfuscation: bool | None = None
    reasoning_summary_delivery: str | None = None


class ResponsesRequest(SamplingFields):
    """Body of POST /v1/responses."""

    model: str | None = Field(None, description="A name that /v1/models lists; may be left out.")
    input: Input = Field(description="Text, or the messages of a conversation.")
    instructions: Text | None = Field(None, description="A system message in front of the input.")
    max_output_tokens: PositiveCount | None = Field(
        None, description="If null, the answer may fill the context."
    )
    include: list[Includable] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    thinking_token_budget: Count | None = Field(
        None, description="vLLM's. The most tokens of the reasoning, which is ended then."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: drop the oldest turns if the context has no room for all."
    )
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None

    # as on the other routes
    request_id: RequestId | None = Field(None, description="Part of the answer's id.")
    chat_template_kwargs: dict[str, Text | bool | int | float] | None = None
    priority: Priority | None = Field(None, description="Lower runs earlier.")
    cache_salt: CacheSalt | None = Field(
        None, description="Only prompts with the same salt share computed keys and values."
    )

    # not supported
    previous_response_id: Stored = None
    conversation: Stored = None
    background: Stored = None
    prompt: Unsupported = None
    context_management: Unsupported = None
    moderation: Unsupported = None
    image: Unsupported = None

    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: FlatToolChoice | None = Field(None, description="auto if null and there are tools")
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")

    # given back in the answer
    metadata: Metadata | None = None
    user: Annotated[Text, Field(max_length=_MAX_USER_CHARS)] | None = None

    # accepted without effect
    store: bool | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    max_tool_calls: PositiveCount | None = None
    client_metadata: dict[str, Any] | None = None
    access_programs: Any = None

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
    def _check_tools(self) -> ResponsesRequest:
        self.as_conversation.tools.check()
        wrong = wrong_call(self.as_conversation.turns)
        if wrong is None:
            return self
        if wrong.is_result:
            raise invalid("input", f"no earlier item is a call {wrong.call_id!r}")
        raise invalid("input", "two calls have the same id")

    @property
    def format(self) -> AnswerFormat | None:
        """The form that the answer must have; None: any text."""
        return self.text.format if self.text else None

    @property
    def num_logprobs(self) -> int | None:
        """The number of likeliest tokens at each position; None: no log-probabilities at all."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    @cached_property
    def as_conversation(self) -> Conversation:
        given = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        turns = [Turn("system", self.instructions)] if self.instructions else []
        return Conversation(
            _with_one_system([*turns, *turns_of(given)]),
            self._tool_offer,
            template_kwargs(
                self.reasoning.effort if self.reasoning else None,
                self.text.verbosity if self.text else None,
                self.chat_template_kwargs,
            ),
            thinking_budget=self._thinking_budget,
        )

    @property
    def _thinking_budget(self) -> int | None:
        is_off = self.reasoning is not None and self.reasoning.effort == "none"
        return 0 if is_off else self.thinking_token_budget

    @property
    def _tool_offer(self) -> ToolOffer:
        names: frozenset[str] = frozenset()
        mode: ToolMode
        match self.tool_choice:
            case None:
                mode = "auto"
            case FlatToolRef(name=name):
                mode, names = "named", frozenset({name})
            case FlatAllowedTools() as allowed:
                mode, names = allowed.mode, frozenset(tool.name for tool in allowed.tools)
            case choice:
                mode = choice
        own = self._functions
        functions = tuple(
            each.tool if each.namespace is None else each.tool.model_copy(update={"name": each.offered_name})
            for each in own
            if isinstance(each.tool, FlatTool)
        )
        is_parallel = self.parallel_tool_calls is not False
        return ToolOffer(functions, mode, names, is_parallel, places=tuple(each.place for each in own))

    @cached_property
    def _placed_tools(self) -> list[PlacedTool]:
        """All tools, those in namespaces included."""
        found = []
        for index, tool in enumerate(self.tools or ()):
            if isinstance(tool, Namespace):
                inner = enumerate(tool.tools)
                found += [PlacedTool(f"tools.{index}.tools.{at}", each, tool.name) for at, each in inner]
            else:
                found.append(PlacedTool(f"tools.{index}", tool))
        return found

    @property
    def _functions(self) -> list[PlacedTool]:
        return [each for each in self._placed_tools if isinstance(each.tool, FlatTool)]

    @property
    def unsupported_tools(self) -> list[str]:
        """Tools that the model does not see, by place and type."""
        others = [each for each in self._placed_tools if isinstance(each.tool, OtherTool)]
        return [f"{each.place} ({each.tool.type})" for each in others]

    @property
    def unsupported_items(self) -> list[str]:
        """Items of the input that the model does not see, by place and type."""
        items = [] if isinstance(self.input, str) else self.input
        return [f"input.{at} ({item.type})" for at, item in enumerate(items) if isinstance(item, OtherItem)]

    @property
    def namespaced(self) -> dict[str, tuple[str, str]]:
        """(namespace, name) of functions in namespaces, by the names that they are offered with."""
        inner = [each for each in self._functions if each.namespace is not None]
        return {each.offered_name: (each.namespace or "", each.own_name) for each in inner}


def _with_one_system(turns: list[Turn]) -> tuple[Turn, ...]:
    """The turns with all the system's turns in front as one: some chat templates take one alone, and Codex
    sends several."""
    number = next((at for at, turn in enumerate(turns) if turn.role != "system"), len(turns))
    if number < 2:
        return tuple(turns)
    return (Turn("system", "\n\n".join(turn.text for turn in turns[:number])), *turns[number:])
