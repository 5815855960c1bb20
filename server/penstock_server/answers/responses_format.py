"""What clients receive from /v1/responses: the response object, and the events of its stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

from pydantic import BaseModel, Field

from penstock import FinishReason, RequestOutput, SamplingParams, Tokenizer, TokenLogprobs
from penstock_server.answers.answers import Answers
from penstock_server.answers.logprobs import LogprobWriter
from penstock_server.answers.streaming import NamedChunk, named_events
from penstock_server.protocol.answer_bodies import ChatTokenLogprob, ToolCallDelta
from penstock_server.protocol.errors import ApiError, api_error
from penstock_server.protocol.responses_request import ResponsesRequest
from penstock_server.tools.answering import ToolAnswer
from penstock_server.tools.use import ToolUse

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


class FunctionCallItem(BaseModel):
    id: str
    type: Literal["function_call"] = "function_call"
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    #: The namespace of the function, if it lies in one.
    namespace: str | None = Field(default=None, exclude_if=lambda namespace: namespace is None)
    #: A JSON object, as text.
    arguments: str


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ReasoningItem(BaseModel):
    """What the model thought before it answered."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[Any] = []
    content: list[ReasoningText]


OutputItem = OutputMessage | FunctionCallItem | ReasoningItem


class InputTokensDetails(BaseModel):
    #: Tokens whose keys and values were kept from earlier requests.
    cached_tokens: int
    #: Tokens that OpenAI bills for keeping; always 0 here.
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
            output_tokens_details=OutputTokensDetails(
                reasoning_tokens=usage.completion_tokens_details.reasoning_tokens
            ),
            total_tokens=usage.total_tokens,
        )


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseError(BaseModel):
    code: Literal["server_error", "context_length_exceeded"]
    message: str


class ResponseObject(BaseModel):
    """The answer of /v1/responses. A field of OpenAI's that Penstock does not have is null, or has the value
    that OpenAI uses for "none"."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    model: str
    output: list[OutputItem] = []
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
    tool_choice: str | dict[str, Any]
    tools: list[Any] = []


class ResponseEvent(NamedChunk):
    """One event of a streamed response. The client gets the members that are set, and no others."""

    sequence_number: int
    response: dict[str, Any] | None = None
    output_index: int | None = None
    item: dict[str, Any] | None = None
    item_id: str | None = None
    content_index: int | None = None
    part: dict[str, Any] | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[ChatTokenLogprob] | None = None


class _Items:
    """The output items of one answer as they grow, and the events that describe each change."""

    def __init__(self, request_id: str, namespaced: Mapping[str, tuple[str, str]]) -> None:
        """namespaced: see ResponsesRequest."""
        self._request_id = request_id
        self._namespaced = namespaced
        self._num_events = 0
        self.items: list[OutputItem] = []

    def event(self, kind: str, **fields: Any) -> ResponseEvent:
        event = ResponseEvent(type=f"response.{kind}", sequence_number=self._num_events, **fields)
        self._num_events += 1
        return event

    def _item_event(self, kind: str, **fields: Any) -> ResponseEvent:
        """An event about the last item."""
        return self.event(kind, output_index=len(self.items) - 1, item_id=self.items[-1].id, **fields)

    def _whole_item_event(self, kind: str) -> ResponseEvent:
        return self.event(kind, output_index=len(self.items) - 1, item=self.items[-1].model_dump())

    def text(self, text: str, logprobs: list[ChatTokenLogprob]) -> list[ResponseEvent]:
        events = self.begin_message()
        part = self._part
        part.text += text
        part.logprobs += logprobs
        delta = self._item_event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)
        return [*events, delta]

    def reasoning(self, text: str) -> list[ResponseEvent]:
        events = []
        if not self.items or not isinstance(self.items[-1], ReasoningItem):
            events = self.close("completed")
            item_id = f"rs_{self._request_id}_{len(self.items)}"
            item = ReasoningItem(id=item_id, status="in_progress", content=[])
            self.items.append(item)
            events.append(self._whole_item_event("output_item.added"))
            item.content.append(ReasoningText(text=""))
            part = item.content[0].model_dump()
            events.append(self._item_event("content_part.added", content_index=0, part=part))
        assert isinstance(last := self.items[-1], ReasoningItem)
        last.content[0].text += text
        return [*events, self._item_event("reasoning_text.delta", content_index=0, delta=text)]

    def begin_message(self) -> list[ResponseEvent]:
        """Begins a message, unless the last item is a message already: then there are no events."""
        if self.items and isinstance(self.items[-1], OutputMessage):
            return []
        events = self.close("completed")
        number = f"_{len(self.items)}" if self.items else ""
        message = OutputMessage(id=f"msg_{self._request_id}{number}", status="in_progress", content=[])
        self.items.append(message)
        events.append(self._whole_item_event("output_item.added"))
        message.content.append(OutputText(text="", logprobs=[]))
        part = self._part.model_dump()
        return [*events, self._item_event("content_part.added", content_index=0, part=part)]

    def call(self, delta: ToolCallDelta) -> list[ResponseEvent]:
        if delta.id is None:
            assert isinstance(item := self.items[-1], FunctionCallItem)
            item.arguments += delta.function.arguments
            return [self._item_event("function_call_arguments.delta", delta=delta.function.arguments)]
        events = self.close("completed")
        item_id = f"fc_{self._request_id}_{len(self.items)}"
        offered = delta.function.name or ""
        namespace, name = self._namespaced.get(offered, (None, offered))
        item = FunctionCallItem(
            id=item_id,
            call_id=delta.id,
            name=name,
            namespace=namespace,
            arguments="",
            status="in_progress",
        )
        self.items.append(item)
        return [*events, self._whole_item_event("output_item.added")]

    def close(self, status: Literal["completed", "incomplete"]) -> list[ResponseEvent]:
        """Ends the last item."""
        if not self.items:
            return []
        item = self.items[-1]
        item.status = status
        if isinstance(item, FunctionCallItem):
            done = self._item_event("function_call_arguments.done", name=item.name, arguments=item.arguments)
            return [done, self._whole_item_event("output_item.done")]
        if isinstance(item, ReasoningItem):
            return self._close_reasoning(item.content[0])
        part = self._part
        return [
            self._item_event("output_text.done", content_index=0, text=part.text, logprobs=part.logprobs),
            self._item_event("content_part.done", content_index=0, part=part.model_dump()),
            self._whole_item_event("output_item.done"),
        ]

    def _close_reasoning(self, part: ReasoningText) -> list[ResponseEvent]:
        return [
            self._item_event("reasoning_text.done", content_index=0, text=part.text),
            self._item_event("content_part.done", content_index=0, part=part.model_dump()),
            self._whole_item_event("output_item.done"),
        ]

    @property
    def _part(self) -> OutputText:
        assert isinstance(item := self.items[-1], OutputMessage)
        return item.content[0]


class ResponsesFormat:
    """The response to one request: a message, or calls of tools with the text around them, after the
    reasoning."""

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        body: ResponsesRequest,
        params: SamplingParams,
        tools: ToolUse | None = None,
        *,
        tokens_as_ids: bool = False,
    ) -> None:
        """tools: how to read an answer that may hold reasoning or calls; None: the answer is text alone.
        tokens_as_ids: log-probabilities name tokens by their ids."""
        self._has_logprobs = body.num_logprobs is not None
        self._writer = LogprobWriter(tokenizer, tokens_as_ids)
        self._calls = ToolAnswer(tools) if tools else None
        self._has_tools = tools is not None and bool(tools.prompt.functions)
        self._items = _Items(request_id, body.namespaced)
        choice = body.tool_choice
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
            text={"format": _text_format(body), "verbosity": (body.text and body.text.verbosity) or "medium"},
            reasoning={"effort": body.reasoning and body.reasoning.effort, "summary": None},
            truncation=body.truncation or "disabled",
            user=body.user,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            tool_choice=choice if isinstance(choice, str) else choice.model_dump() if choice else "auto",
            tools=[tool.model_dump() for tool in body.tools or ()],
        )

    def whole(self, answers: Answers) -> ResponseObject:
        """The whole response, for an answer that is not streamed (delta() was never called)."""
        (answer,) = answers
        num_before = answer.thinking.num_before_answer if answer.thinking else 0
        self._grow(answer.text, answer.logprobs[num_before:], is_last=True)
        self._end(answers)
        return self._ended(answers)

    def _grow(self, text: str, tokens: Sequence[TokenLogprobs], is_last: bool) -> list[ResponseEvent]:
        logprobs = self._writer.chat(tokens) if self._has_logprobs else []
        if self._calls is None:
            return self._items.text(text, logprobs) if text or logprobs else []
        events = []
        for delta in self._calls.deltas(text, is_last):
            if delta.reasoning_content:
                events += self._items.reasoning(delta.reasoning_content)
            if delta.content:
                events += self._items.text(delta.content, [] if self._has_tools else logprobs)
                logprobs = []
            for call in delta.tool_calls or ():
                events += self._items.call(call)
        return events

    def _end(self, answers: Answers) -> list[ResponseEvent]:
        """Ends the last item. An answer without text gets one item, a message without text."""
        events = [] if self._items.items else self._items.begin_message()
        return events + self._items.close("incomplete" if _is_cut(answers) else "completed")

    def _ended(self, answers: Answers) -> ResponseObject:
        is_cut = _is_cut(answers)
        return self._begun.model_copy(
            update={
                "status": "incomplete" if is_cut else "completed",
                "completed_at": None if is_cut else int(time.time()),
                "incomplete_details": IncompleteDetails(reason="max_output_tokens") if is_cut else None,
                "output": self._items.items,
                "usage": ResponseUsage.of(answers),
            }
        )

    # -- the stream -----------------------------------------------------------------------------

    def events(self, answers: Answers, idle_s: float | None) -> AsyncGenerator[bytes, None]:
        return named_events(response_events(self, answers, idle_s))

    def begin(self) -> list[ResponseEvent]:
        """The first events, sent before the answer begins."""
        response = self._begun.model_dump()
        return [self._items.event(kind, response=response) for kind in ("created", "in_progress")]

    def delta(self, output: RequestOutput) -> list[ResponseEvent]:
        return self._grow(output.text, output.logprobs, output.finish_reason is not None)

    def end(self, answers: Answers) -> list[ResponseEvent]:
        events = self._end(answers)
        response = self._ended(answers)
        return [*events, self._items.event(response.status, response=response.model_dump())]

    def failed(self, error: ApiError) -> ResponseEvent:
        is_full = error.code == "context_length_exceeded"
        reason = ResponseError(
            code="context_length_exceeded" if is_full else "server_error", message=error.detail
        )
        response = self._begun.model_copy(update={"status": "failed", "error": reason})
        return self._items.event("failed", response=response.model_dump())

    async def refusal(self, error: Exception) -> AsyncGenerator[ResponseEvent, None]:
        """The events of a request that is refused."""
        for event in [*self.begin(), self.failed(api_error(error))]:
            yield event


def _is_cut(answers: Answers) -> bool:
    (answer,) = answers
    return answer.finish_reason is FinishReason.LENGTH


def _text_format(body: ResponsesRequest) -> dict[str, Any]:
    form = body.text and body.text.format
    return form.model_dump(exclude_none=True, by_alias=True) if form else {"type": "text"}


async def response_events(
    form: ResponsesFormat, answers: Answers, idle_s: float | None
) -> AsyncGenerator[ResponseEvent | None, None]:
    """All events of a request, also that of an error; None after each `idle_s` seconds of silence."""
    for event in form.begin():
        yield event
    try:
        async with aclosing(answers.outputs(idle_s)) as outputs:
            async for item in outputs:
                events = form.delta(item[1]) if item is not None else []
                for event in events:
                    yield event
                goes_on = item is None or item[1].finish_reason is None
                if not events and goes_on and idle_s:
                    yield None  # silence, or an output that is held back, maybe for long
    except Exception as error:
        yield form.failed(api_error(error))
    else:
        for event in form.end(answers):
            yield event
