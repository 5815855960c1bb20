"""/v1/responses, stateless: a conversation in, an answer out, and nothing is kept."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel
from starlette.responses import Response

from penstock.async_engine import AsyncEngine
from penstock.engine import Engine
from penstock_server.answers import Answers
from penstock_server.errors import ApiError
from penstock_server.inputs import Prompt, read_bad_words, read_messages, sampling_params
from penstock_server.metrics import RequestMetrics
from penstock_server.openai import (
    ERRORS,
    Constraints,
    check_model,
    checked_priority,
    event_stream_of,
    require_json,
)
from penstock_server.operations import ready_engine
from penstock_server.responses_format import (
    ResponseEvent,
    ResponseObject,
    ResponsesFormat,
    response_events,
)
from penstock_server.responses_protocol import ResponsesRequest
from penstock_server.settings import Settings
from penstock_server.streaming import EventStream, named_events, unless_disconnected
from penstock_server.structured_outputs import read_grammar
from penstock_server.text_thread import TextThread
from penstock_server.tools.use import ToolUse


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponsesRoutes:
    def __init__(
        self, engine: AsyncEngine, settings: Settings, metrics: RequestMetrics, texts: TextThread
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._texts = texts

    def router(self) -> APIRouter:
        router = APIRouter(tags=["responses"], responses=ERRORS)
        takes_json = [Depends(require_json)]
        stream: dict[int | str, dict[str, Any]] = {200: event_stream_of(ResponseEvent.__name__, last=None)}
        router.post("/responses", response_model=ResponseObject, dependencies=takes_json, responses=stream)(
            self.create
        )
        router.post("/responses/input_tokens", dependencies=takes_json)(self.count)
        router.get("/responses/{response_id}")(self.find)
        router.delete("/responses/{response_id}")(self.find)
        router.post("/responses/{response_id}/cancel")(self.find)
        router.get("/responses/{response_id}/input_items")(self.find)
        return router

    async def create(self, body: ResponsesRequest, request: Request) -> Response:
        check_model(body.model, self._settings)
        engine = ready_engine(self._engine)
        use = self._use(engine, body)
        prompt, constraints = await self._texts.run(
            lambda: (read_conversation(engine, body, use), read_demands(engine, body))
        )
        (params,) = sampling_params(
            body, engine.default_sampling, body.max_output_tokens, body.num_logprobs, **constraints
        )
        params = use.bind(params)
        await self._texts.run(lambda: use.check(engine, params.grammar))
        form = ResponsesFormat(
            body.request_id or request.state.request_id,
            self._settings.model_names[0],
            engine.tokenizer,
            body,
            params,
            use if use.parser() else None,
            tokens_as_ids=self._settings.return_tokens_as_token_ids,
        )
        answers = Answers(
            self._engine,
            self._metrics,
            [prompt.token_ids],
            [params],
            checked_priority(body.priority, self._settings),
            body.cache_salt or "",
        )
        if body.stream:
            idle_s = self._settings.sse_keep_alive or None
            return EventStream(named_events(response_events(form, answers, idle_s)), answers.close)
        try:
            await unless_disconnected(request.receive, answers.finish())
        finally:
            answers.close()
        return Response(form.whole(answers).model_dump_json(), media_type="application/json")

    async def count(self, body: ResponsesRequest) -> InputTokens:
        """How many tokens the input of such a request has."""
        check_model(body.model, self._settings)
        engine = ready_engine(self._engine)
        use = self._use(engine, body)
        prompt = await self._texts.run(lambda: read_conversation(engine, body, use))
        return InputTokens(input_tokens=len(prompt.token_ids))

    def _use(self, engine: Engine, body: ResponsesRequest) -> ToolUse:
        return ToolUse.of(body.chat(body.messages), engine.tokenizer, self._settings.tool_call_parser)

    async def find(self, response_id: str) -> None:
        """404: nothing is stored."""
        message = f"There is no response {response_id!r}: this server keeps none, whatever `store` says."
        raise ApiError(404, message, code="response_not_found", param="response_id")


def read_demands(engine: Engine, body: ResponsesRequest) -> Constraints:
    """Raises 400, naming the field, for a format that can't be kept to."""
    try:
        grammar = read_grammar(engine, body.chat(body.messages))
    except ApiError as error:
        message = error.detail.replace("response_format", "text.format", 1)
        raise ApiError(error.status_code, message, code=error.code, param="text.format") from error
    return {"bad_words": read_bad_words(engine.tokenizer, body.bad_words or ()), "grammar": grammar}


def read_conversation(engine: Engine, body: ResponsesRequest, use: ToolUse) -> Prompt:
    """With truncation "auto" without the oldest turns, as far as the context demands; system messages in
    front stay, and what remains begins with a user's message. Raises what read_messages() raises."""
    messages = body.messages
    if body.truncation != "auto":
        return read_messages(engine, body.chat(messages), use)
    first = next((i for i, each in enumerate(messages) if each.role not in ("system", "developer")), 0)
    starts = [first, *(i for i in range(first + 1, len(messages)) if messages[i].role == "user")]

    def prompt(start: int) -> Prompt:
        return read_messages(engine, body.chat(messages[:first] + messages[start:]), use)

    room = engine.max_model_len - (body.max_output_tokens or 1)
    index = bisect_left(starts, True, key=lambda start: len(prompt(start).token_ids) <= room)
    return prompt(starts[min(index, len(starts) - 1)])
