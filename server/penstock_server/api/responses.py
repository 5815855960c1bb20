"""/v1/responses, stateless: a conversation in, an answer out, and nothing is kept."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel
from starlette.responses import Response

from penstock.async_engine import AsyncEngine
from penstock.engine import Engine
from penstock.errors import ContextOverflow
from penstock.generation.generation_request import SamplingParams
from penstock_server.answers.responses_format import ResponseEvent, ResponseObject, ResponsesFormat
from penstock_server.api.openai import (
    ERRORS,
    Constraints,
    OpenAIRoutes,
    check_model,
    event_stream_of,
    require_json,
)
from penstock_server.api.operations import ready_engine
from penstock_server.api.tokenization import check_length
from penstock_server.prompts.inputs import (
    Prompt,
    read_bad_words,
    read_messages,
    refuse_long_text,
    sampling_params,
)
from penstock_server.prompts.structured_outputs import read_grammar
from penstock_server.prompts.text_thread import TextThread
from penstock_server.protocol.errors import ApiError
from penstock_server.protocol.requests import ChatCompletionRequest
from penstock_server.protocol.responses_request import ResponsesRequest
from penstock_server.settings.settings import Settings
from penstock_server.tools.parsers import ParserChoice
from penstock_server.tools.use import ToolUse


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponsesRoutes:
    def __init__(
        self, engine: AsyncEngine, settings: Settings, texts: TextThread, openai: OpenAIRoutes
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._texts = texts
        self._openai = openai

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
        parser = self._settings.tool_call_parser
        prompt, params, use = await self._texts.run(lambda: read_response(engine, body, parser))
        form = ResponsesFormat(
            body.request_id or request.state.request_id,
            self._settings.model_names[0],
            engine.tokenizer,
            body,
            params,
            use if use.parser() else None,
            tokens_as_ids=self._settings.return_tokens_as_token_ids,
        )
        return await self._openai.respond(request, body, form, [prompt], [params], tools=use)

    async def count(self, body: ResponsesRequest) -> InputTokens:
        """How many tokens the input of such a request has."""
        check_model(body.model, self._settings)
        engine = ready_engine(self._engine)
        parser = self._settings.tool_call_parser
        num_chars = sum(len(message.text) for message in body.messages)
        check_length("input", num_chars, "characters", 8 * engine.max_model_len)
        prompt, _ = await self._texts.run(lambda: read_conversation(engine, body, parser, may_be_long=True))
        return InputTokens(input_tokens=len(prompt.token_ids))

    async def find(self, response_id: str) -> None:
        """404: nothing is stored."""
        message = f"There is no response {response_id!r}: this server keeps none, whatever `store` says."
        raise ApiError(404, message, code="response_not_found", param="response_id")


def read_response(
    engine: Engine, body: ResponsesRequest, parser: ParserChoice
) -> tuple[Prompt, SamplingParams, ToolUse]:
    """Takes a while, for long texts and large grammars: not for the event loop."""
    prompt, use = read_conversation(engine, body, parser)
    params = sampling_params(
        body,
        engine.default_sampling,
        body.max_output_tokens,
        body.num_logprobs,
        **read_demands(engine, body),
    )
    params = use.bind(params)
    use.check(engine, params.grammar)
    return prompt, params, use


def read_demands(engine: Engine, body: ResponsesRequest) -> Constraints:
    """Raises 400, naming the field, for a format that can't be kept to."""
    try:
        grammar = read_grammar(engine, body.chat(body.messages))
    except ApiError as error:
        message = error.detail.replace("response_format", "text.format", 1)
        raise ApiError(error.status_code, message, code=error.code, param="text.format") from error
    return {"bad_words": read_bad_words(engine.tokenizer, body.bad_words or ()), "grammar": grammar}


def read_conversation(
    engine: Engine, body: ResponsesRequest, parser: ParserChoice, may_be_long: bool = False
) -> tuple[Prompt, ToolUse]:
    """With truncation "auto" without the oldest turns, as far as the context demands; system messages in
    front stay, and what remains begins with a user's message. Raises what read_messages() raises, and unless
    it may be long what refuse_long_text() raises."""
    messages = body.messages
    use = ToolUse.of(body.chat(messages), engine.tokenizer, parser)
    first = next((i for i, each in enumerate(messages) if each.role not in ("system", "developer")), 0)
    starts = [first]
    if body.truncation == "auto":
        starts += [i for i in range(first + 1, len(messages)) if messages[i].role == "user"]
    room = engine.max_model_len - (body.max_output_tokens or 1)

    def chat(start: int) -> ChatCompletionRequest:
        return body.chat(messages[:first] + messages[start:])

    def fits(start: int) -> bool:
        try:
            refuse_long_text(engine, chat(start))
        except ContextOverflow:
            return False
        return len(read_messages(engine, chat(start), use).token_ids) <= room

    # The last one need not fit: whoever computes it says why it does not.
    kept = chat(starts[bisect_left(starts[:-1], True, key=fits)])
    if not may_be_long:
        refuse_long_text(engine, kept)
    return read_messages(engine, kept, use), use
