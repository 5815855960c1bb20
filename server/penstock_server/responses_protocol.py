"""What clients may send to POST /v1/responses. The rules are those of protocol.py; accepted without effect:

    store      nothing is stored, so that previous_response_id, conversation and background are refused
    user, safety_identifier, service_tier      accounting at OpenAI
    prompt_cache_key, prompt_cache_options, prompt_cache_retention, prompt_cache_breakpoint      hints
    parallel_tool_calls, max_tool_calls      say nothing while there are no tools
    include      but for message.output_text.logprobs: what the others add to, there is none of here
    reasoning.summary "auto"      there are no summaries
    id, status, phase, annotations, logprobs of input items      what answers of ours carry
    stream_options.include_obfuscation      padding against eavesdroppers; we send none

`metadata` comes back in the answer, as at OpenAI.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock.generation.sequence import MAX_LOGPROBS
from penstock_server.protocol import (
    ChatCompletionRequest,
    JsonObjectFormat,
    Message,
    RequestId,
    SamplingFields,
    TextFormat,
)
from penstock_server.wire import PositiveCount, Text, Unsupported, Wire, invalid

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


class InputMessage(Wire):
    """One turn."""

    type: Annotated[Literal["message"] | None, _known("items", "message")] = None
    role: Role
    content: Annotated[
        Annotated[Text, Tag("string")] | Annotated[list[InputPart], Tag("list")],
        Discriminator(_kind_of_content),
    ]

    # accepted without effect
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    @property
    def message(self) -> Message:
        """The same as /v1/chat/completions has it; parts joined by line ends."""
        parts = self.content
        text = parts if isinstance(parts, str) else "\n".join(part.content for part in parts)
        return Message.model_validate({"role": self.role, "content": text})


Input = Annotated[
    Annotated[Text, Tag("string")] | Annotated[list[InputMessage], Field(min_length=1), Tag("list")],
    Discriminator(_kind_of_content),
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
    verbosity: Literal["medium"] | None = None


class Reasoning(Wire):
    effort: Text | None = Field(None, description="For the model's chat template.")
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


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
    cache_salt: Unsupported = None

    # not supported
    previous_response_id: Stored = None
    conversation: Stored = None
    background: Stored = None
    prompt: Unsupported = None
    tools: Unsupported = None
    tool_choice: Literal["none", "auto"] | None = None
    context_management: Unsupported = None
    moderation: Unsupported = None
    image: Unsupported = None
    access_programs: Unsupported = None

    metadata: dict[str, str] | None = None

    # accepted without effect
    store: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: PositiveCount | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> ResponsesRequest:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "only allowed when stream is true")
        if self.top_logprobs and LOGPROBS not in (self.include or ()):
            raise invalid("top_logprobs", f"only allowed when include has {LOGPROBS!r}")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to report per position; None: no log-probabilities at all."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    @property
    def messages(self) -> list[Message]:
        """The conversation as /v1/chat/completions has it."""
        turns = self.input
        if isinstance(turns, str):
            turns = [InputMessage(role="user", content=turns)]
        if self.instructions:
            turns = [InputMessage(role="system", content=self.instructions), *turns]
        return [turn.message for turn in turns]

    def chat(self, messages: list[Message]) -> ChatCompletionRequest:
        """The same question about these messages, for whoever renders them."""
        return ChatCompletionRequest.model_validate(
            {
                "messages": messages,
                "reasoning_effort": self.reasoning.effort if self.reasoning else None,
                "chat_template_kwargs": self.chat_template_kwargs,
                "response_format": self._response_format,
            }
        )

    @property
    def _response_format(self) -> dict[str, Any] | None:
        form = self.text and self.text.format
        if not form:
            return None
        members = form.model_dump(by_alias=True, exclude={"type"})
        return {"type": form.type} | ({"json_schema": members} if members else {})
