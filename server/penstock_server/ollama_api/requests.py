"""The bodies of requests to Ollama's /api/chat and /api/generate. The rules are those of
protocol/requests.py, but for unknown fields: they are left out, as by Ollama, and named in the header
X-Penstock-Ignored. Accepted without effect:

    shift      an answer ends when the context is full
    options of how to load a model      see options.py

`truncate` is true by default, as at Ollama: if the context has no room for all messages, the oldest are left
out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock import MAX_LOGPROBS
from penstock_server.ollama_api.options import Options, Whole
from penstock_server.protocol.conversation import (
    Call,
    Conversation,
    Turn,
    template_kwargs,
    tool_offer,
)
from penstock_server.protocol.messages import MessageContent, text_of
from penstock_server.protocol.other_parts import MAX_PARTS, always_noted, leniency_of, note
from penstock_server.protocol.output_formats import JsonObjectFormat, JsonSchemaFormat, NamedSchema
from penstock_server.protocol.requests import MAX_MESSAGES, ChatCompletionRequest, CompletionRequest
from penstock_server.protocol.tools import MAX_DEPTH, MAX_TOOLS_ELSEWHERE, FunctionType, Tool, is_too_deep
from penstock_server.protocol.wire import Text, Unsupported, Wire, invalid
from penstock_server.settings.values import parse_keep_alive

NO_OPTIONS = Options.model_validate({})
_ANY_OBJECT = JsonObjectFormat.model_validate({"type": "json_object"})


def _with_notes(body: Any, text: str, info: ValidationInfo) -> Any:
    """A body whose images are notes after its `text`, if notes may stand for them."""
    images = body.get("images") if isinstance(body, dict) else None
    leniency = leniency_of(info)
    leniency = always_noted(leniency) if images and _role(body.get("role")) == "tool" else leniency
    if not isinstance(images, list) or not images or not leniency.is_lenient:
        return body
    leniency.left_out["image"] += len(images)
    notes = [note("image")] * len(images)
    said = body.get(text) or ""
    if isinstance(said, list):
        said = [*said, *({"type": "text", "text": each} for each in notes)]
    elif isinstance(said, str):
        said = "\n".join(filter(None, [said, *notes]))
    return body | {"images": None, text: said}


def _refuse_images(value: object) -> None:
    if value:
        message = (
            "images are not supported by this server, whose models read text: leave them out, or start the "
            "server with --lenient, which puts a note in their place"
        )
        raise PydanticCustomError("unsupported_content", "{message}", {"message": message})


Images = Annotated[None, PlainValidator(_refuse_images), WithJsonSchema({"type": "null"})]


def _role(value: object) -> object:
    """Chat templates know no developers: their messages are the system's."""
    role = value.lower() if isinstance(value, str) else value
    return "system" if role == "developer" else role


def _no_arguments(value: object) -> object:
    """Clients in Go write null for a map without members."""
    return {} if value is None else value


def _check_arguments(value: dict[str, Any]) -> dict[str, Any]:
    if is_too_deep(value):
        raise PydanticCustomError("invalid_value", "nests deeper than {levels} levels", {"levels": MAX_DEPTH})
    return value


class CalledFunction(Wire):
    name: Annotated[Text, Field(min_length=1)]
    arguments: Annotated[dict[str, Any], BeforeValidator(_no_arguments), AfterValidator(_check_arguments)] = (
        Field({}, description="null: none")
    )
    index: Whole | None = None
    description: str | None = None


class ToolCall(Wire):
    """A call that an earlier answer made."""

    id: Text | None = None
    type: str | None = None
    function: CalledFunction


class OllamaMessage(Wire):
    role: Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(_role)]
    content: MessageContent | None = None
    thinking: Text | None = Field(None, description="The reasoning of an earlier answer.")
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_PARTS)] | None = None
    tool_name: Text | None = None
    tool_call_id: Text | None = None
    name: Text | None = None
    images: Images = None

    @model_validator(mode="before")
    @classmethod
    def _read_images(cls, body: Any, info: ValidationInfo) -> Any:
        return _with_notes(body, "content", info)

    @model_validator(mode="after")
    def _check_calls(self) -> OllamaMessage:
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("misplaced_calls", "only an assistant's message has tool_calls")
        return self

    @property
    def text(self) -> str:
        return text_of(self.content)


class OllamaTool(Tool):
    type: FunctionType = "function"

    # accepted without effect
    items: Any = None


def _check_keep_alive(value: float | str | None) -> float | str | None:
    if value is not None:
        parse_keep_alive(str(value))
    return value


KeepAlive = Annotated[float | str | None, AfterValidator(_check_keep_alive)]


def _kind_of_format(value: object) -> str:
    return "schema" if isinstance(value, dict) else "name"


class ModelFields(Wire):
    """What all routes have that use a model."""

    model: str
    options: Options | None = None
    keep_alive: KeepAlive = Field(None, description="How long the model stays loaded afterwards.")

    @property
    def keep_alive_s(self) -> float | None:
        """Seconds; infinity for what is below 0. None: the server's setting."""
        return None if self.keep_alive is None else parse_keep_alive(str(self.keep_alive))


class GeneratingRequest(ModelFields):
    """What the routes that write text have in common."""

    stream: bool | None = Field(None, description="true if null")
    format: (
        Annotated[
            Annotated[Literal["", "json"], Tag("name")] | Annotated[dict[str, Any], Tag("schema")],
            Discriminator(_kind_of_format),
        ]
        | None
    ) = Field(None, description="'json', or a JSON Schema that the answer must follow.")
    think: bool | Text | None = Field(None, description="Whether the model thinks first, or how hard.")
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    # accepted without effect
    shift: bool | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a chat request."""
        return (self.options or NO_OPTIONS).sampling | {
            "stream": self.stream is not False,
            "response_format": self._response_format,
            "logprobs": bool(self.logprobs),
            "top_logprobs": self.top_logprobs,
        }

    @property
    def _response_format(self) -> JsonObjectFormat | JsonSchemaFormat | None:
        if isinstance(self.format, dict):
            return JsonSchemaFormat(type="json_schema", json_schema=NamedSchema(schema=self.format))
        return _ANY_OBJECT if self.format else None

    @property
    def thinking_budget(self) -> int | None:
        return 0 if self.think is False else None

    @property
    def template_kwargs(self) -> dict[str, Any]:
        own = {"enable_thinking": self.think} if isinstance(self.think, bool) else {}
        return template_kwargs(self.think if isinstance(self.think, str) else None, None, own)


class ChatRequest(GeneratingRequest):
    """Body of POST /api/chat. Without messages, it asks whether the model is loaded."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[OllamaTool], Field(max_length=MAX_TOOLS_ELSEWHERE)] | None = None
    truncate: bool | None = Field(None, description="false: messages that do not fit are refused.")

    @model_validator(mode="after")
    def _check_messages(self) -> ChatRequest:
        if self.messages:
            self.as_conversation.tools.check()
        return self

    @cached_property
    def as_conversation(self) -> Conversation:
        turns = tuple(turns_of(self.messages or ()))
        goes_on = turns[-1].role == "assistant" and not turns[-1].calls
        return Conversation(
            turns,
            tool_offer(self.tools),
            self.template_kwargs,
            not goes_on,
            goes_on,
            self.thinking_budget,
        )

    @property
    def as_chat(self) -> ChatCompletionRequest:
        """The same request to /v1/chat/completions."""
        return ChatCompletionRequest.of(self.as_conversation, **self.fields)


class GenerateRequest(GeneratingRequest):
    """Body of POST /api/generate. Without a prompt, it asks whether the model is loaded."""

    prompt: Text | None = None
    system: Text | None = None
    suffix: Text | None = Field(None, description="The text after the answer, for models that fill in.")
    raw: bool | None = Field(None, description="true: the prompt is no message of a chat.")
    images: Images = None

    # not supported
    template: Unsupported = None
    context: Unsupported = None
    width: Unsupported = None
    height: Unsupported = None
    steps: Unsupported = None

    # accepted without effect
    truncate: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_images(cls, body: Any, info: ValidationInfo) -> Any:
        return _with_notes(body, "prompt", info)

    @model_validator(mode="after")
    def _check_system(self) -> GenerateRequest:
        if self.system and (self.raw or self.suffix):
            raise invalid("system", "has no place in a prompt that is raw or has a suffix")
        return self

    @property
    def as_chat(self) -> ChatCompletionRequest:
        """The prompt as the message of a chat."""
        turns = [Turn("system", self.system)] if self.system else []
        turns.append(Turn("user", self.prompt or ""))
        conversation = Conversation(
            tuple(turns), template_kwargs=self.template_kwargs, thinking_budget=self.thinking_budget
        )
        return ChatCompletionRequest.of(conversation, **self.fields)

    @property
    def as_completion(self) -> CompletionRequest:
        """The prompt as it is."""
        fields = self.fields
        num_logprobs = (self.top_logprobs or 0) if fields.pop("logprobs") else None
        del fields["top_logprobs"]
        return CompletionRequest.model_construct(
            prompt=self.prompt or "", suffix=self.suffix, logprobs=num_logprobs, **fields
        )


def turns_of(messages: Iterable[OllamaMessage]) -> Iterable[Turn]:
    """The turns of messages. Calls without an id of their own get one; a result without an id belongs to the
    first call of its tool's name that has no result yet, or to the first call of all. A result without an
    earlier call is shown as the result of its tool."""
    waiting: list[Call] = []
    for number, message in enumerate(messages):
        calls = tuple(_calls_of(message, number))
        call_id, name = message.tool_call_id, message.name
        if message.role == "tool":
            tool = message.tool_name or name
            answered = [call for call in waiting if call_id in (None, "", call.call_id)]
            answered = [call for call in answered if call_id or tool in (None, call.name)][:1]
            call_id = answered[0].call_id if answered else call_id or f"result_{number}"
            name = name if answered else tool
            waiting = [call for call in waiting if call not in answered]
        waiting += calls
        yield Turn(message.role, message.text, name, message.thinking, calls, call_id or None)


def _calls_of(message: OllamaMessage, number: int) -> Iterable[Call]:
    """number: the place of the message."""
    ids = [call.id for call in message.tool_calls or ()]
    for index, call in enumerate(message.tool_calls or ()):
        is_own = call.id and call.id not in ids[:index]
        call_id = call.id if call.id and is_own else f"call_{number}_{index}"
        yield Call(call_id, call.function.name, json.dumps(call.function.arguments, ensure_ascii=False))
