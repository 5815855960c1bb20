"""What clients receive from /v1/responses: the response object, and the events of its stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal

from pydantic import BaseModel

from penstock.generation.request import RequestOutput
from penstock.generation.sequence import FinishReason, SamplingParams, TokenLogprobs
from penstock.text.tokenizer import Tokenizer
from penstock_server.answers import Answers
from penstock_server.errors import ApiError, api_error
from penstock_server.logprobs import LogprobWriter
from penstock_server.responses import ChatTokenLogprob
from penstock_server.responses_protocol import ResponsesRequest
from penstock_server.streaming import NamedChunk

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class InputTokensDetails(BaseModel):
    #: Tokens whose keys and values were kept from earlier requests.
    cached_tokens: int
    #: What OpenAI bills for keeping them.
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, answers: Answers) -> ResponseUsage:
        usage = answers.usage
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(),
            total_tokens=usage.total_tokens,
        )


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseError(BaseModel):
    code: Literal["server_error"]
    message: str


class ResponseObject(BaseModel):
    """The answer of /v1/responses. What we don't have is null or what OpenAI says of its absence."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    model: str
    output: list[OutputMessage] = []
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str]
    temperature: float
    top_p: float
    top_logprobs: int
    text: dict[str, Any]
    reasoning: dict[str, Any]
    truncation: Literal["auto", "disabled"]
    user: str | None = None
    background: Literal[False] = False
    store: Literal[False] = False
    previous_response_id: None = None
    parallel_tool_calls: bool
    tool_choice: str
    tools: list[Any] = []


class ResponseEvent(NamedChunk):
    """One event of a streamed response; those of its members are sent that are set."""

    sequence_number: int
    response: dict[str, Any] | None = None
    output_index: int | None = None
    item: dict[str, Any] | None = None
    item_id: str | None = None
    content_index: int | None = None
    part: dict[str, Any] | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[ChatTokenLogprob] | None = None


class ResponsesFormat:
    """One request's response: one message with one part of text."""

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        body: ResponsesRequest,
        params: SamplingParams,
    ) -> None:
        self._item_id = f"msg_{request_id}"
        self._has_logprobs = body.num_logprobs is not None
        self._writer = LogprobWriter(tokenizer)
        self._num_events = 0
        self._begun = ResponseObject(
            id=f"resp_{request_id}",
            created_at=int(time.time()),
            status="in_progress",
            model=model,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            temperature=params.temperature,
            top_p=params.top_p,
            top_logprobs=body.top_logprobs or 0,
            text={"format": _text_format(body), "verbosity": "medium"},
            reasoning={"effort": body.reasoning and body.reasoning.effort, "summary": None},
            truncation=body.truncation or "disabled",
            user=body.user,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            tool_choice=body.tool_choice or "auto",
        )

    def whole(self, answers: Answers) -> ResponseObject:
        (answer,) = answers
        is_cut = answer.finish_reason is FinishReason.LENGTH
        status: Literal["completed", "incomplete"] = "incomplete" if is_cut else "completed"
        message = OutputMessage(id=self._item_id, status=status, content=[self._part(answers)])
        return self._begun.model_copy(
            update={
                "status": status,
                "completed_at": None if is_cut else int(time.time()),
                "incomplete_details": IncompleteDetails(reason="max_output_tokens") if is_cut else None,
                "output": [message],
                "usage": ResponseUsage.of(answers),
            }
        )

    def _part(self, answers: Answers) -> OutputText:
        (answer,) = answers
        return OutputText(text=answer.text, logprobs=self._logprobs(answer.logprobs))

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> list[ChatTokenLogprob]:
        return self._writer.chat(tokens) if self._has_logprobs else []

    # -- the stream -----------------------------------------------------------------------------

    def begin(self) -> list[ResponseEvent]:
        """Before anything is known of the answer."""
        response = self._begun.model_dump()
        item = OutputMessage(id=self._item_id, status="in_progress", content=[]).model_dump()
        part = OutputText(text="").model_dump()
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event("response.output_item.added", output_index=0, item=item),
            self._text_event("response.content_part.added", part=part),
        ]

    def delta(self, output: RequestOutput) -> list[ResponseEvent]:
        if not (output.text or output.logprobs):
            return []
        logprobs = self._logprobs(output.logprobs)
        return [self._text_event("response.output_text.delta", delta=output.text, logprobs=logprobs)]

    def end(self, answers: Answers) -> list[ResponseEvent]:
        response = self.whole(answers)
        (message,) = response.output
        (part,) = message.content
        return [
            self._text_event("response.output_text.done", text=part.text, logprobs=part.logprobs),
            self._text_event("response.content_part.done", part=part.model_dump()),
            self._event("response.output_item.done", output_index=0, item=message.model_dump()),
            self._event(f"response.{response.status}", response=response.model_dump()),
        ]

    def failed(self, error: ApiError) -> ResponseEvent:
        reason = ResponseError(code="server_error", message=error.detail)
        response = self._begun.model_copy(update={"status": "failed", "error": reason})
        return self._event("response.failed", response=response.model_dump())

    def _text_event(self, kind: str, **fields: Any) -> ResponseEvent:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        event = ResponseEvent(type=kind, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return event


def _text_format(body: ResponsesRequest) -> dict[str, Any]:
    form = body.text and body.text.format
    return form.model_dump(exclude_none=True, by_alias=True) if form else {"type": "text"}


async def response_events(
    form: ResponsesFormat, answers: Answers, idle_s: float | None
) -> AsyncGenerator[ResponseEvent | None, None]:
    """All events of a request, an error among them; None whenever nothing came for `idle_s` seconds."""
    for event in form.begin():
        yield event
    try:
        async with aclosing(answers.outputs(idle_s)) as outputs:
            async for item in outputs:
                if item is None:
                    yield None
                else:
                    for event in form.delta(item[1]):
                        yield event
    except Exception as error:
        yield form.failed(api_error(error))
    else:
        for event in form.end(answers):
            yield event
