"""The answers of Ollama's API. Members without a value are left out, as by Ollama."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, model_serializer

from penstock_server.telemetry.request_info import AnswerTimes, current_request


class Sparse(BaseModel):
    @model_serializer(mode="wrap")
    def _without_null(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if value is not None}


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class CalledFunctionOut(BaseModel):
    index: int
    name: str
    arguments: dict[str, Any]


class ToolCallOut(BaseModel):
    id: str
    function: CalledFunctionOut


class MessageOut(Sparse):
    role: str = "assistant"
    content: str = ""
    thinking: str | None = None
    tool_calls: list[ToolCallOut] | None = None


class Answered(Sparse):
    """What the answers of /api/chat and /api/generate have in common. Durations are nanoseconds."""

    model: str
    created_at: str = Field(default_factory=now)
    done: bool = False
    #: "stop", "length", or "load" for an answer to no prompt.
    done_reason: str | None = None
    logprobs: list[dict[str, Any]] | None = None
    total_duration: int | None = None
    #: Until the first step that computed the prompt.
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class ChatAnswer(Answered):
    message: MessageOut = MessageOut()


class GenerateAnswer(Answered):
    response: str = ""
    thinking: str | None = None


def durations() -> dict[str, int]:
    """The durations of the answer to the request in work, which has one answer."""
    request = current_request.get()
    if request is None or not request.answers:
        return {}
    times: AnswerTimes = request.answers[0]
    started = times.started if times.started is not None else times.arrival
    first = times.first if times.first is not None else started
    last = times.last if times.last is not None else first
    if last <= first and times.num_output_tokens:
        # The answer's only step also ended the prompt. Clients divide by both durations, so neither is zero:
        # prompt and answer share the step by their numbers of tokens.
        num_tokens = request.num_prompt_tokens + times.num_output_tokens
        first -= (first - started) * times.num_output_tokens / num_tokens
    spans = {
        "total_duration": time.monotonic() - request.arrival,
        "load_duration": started - request.arrival,
        "prompt_eval_duration": first - started,
        "eval_duration": last - first,
    }
    return {name: max(0, round(seconds * 1e9)) for name, seconds in spans.items()}


class Details(BaseModel):
    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    #: "1.1B"
    parameter_size: str = ""
    #: "Q4_K_M", "INT8"
    quantization_level: str = ""


class ListedModel(Sparse):
    name: str
    model: str
    modified_at: str
    #: Bytes of the weights.
    size: int
    digest: str
    details: Details
    capabilities: list[str] | None = None


class ModelListing(BaseModel):
    models: list[ListedModel]


class RunningModel(BaseModel):
    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    #: Bytes in the GPU's memory.
    size_vram: int
    context_length: int


class RunningModels(BaseModel):
    models: list[RunningModel]


class ShownModel(BaseModel):
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class ApiVersion(BaseModel):
    version: str
