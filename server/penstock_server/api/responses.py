"""/v1/responses, stateless: a conversation goes in, an answer comes out, and the server keeps nothing."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from penstock import SamplingParams
from penstock.errors import ContextOverflow
from penstock_server.answers.responses_format import ResponseEvent, ResponseObject, ResponsesFormat
from penstock_server.answers.streaming import EventStream, named_events
from penstock_server.prompts.questions import read_input, read_response
from penstock_server.protocol.errors import ApiError
from penstock_server.protocol.responses_request import ResponsesRequest
from penstock_server.routing.body_route import BodyRoute
from penstock_server.routing.checks import check_length, leave_out, note_ignored
from penstock_server.routing.descriptions import ERRORS, event_stream_of
from penstock_server.routing.generation_routes import GenerationRoutes


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponsesRoutes(GenerationRoutes):
    def router(self) -> APIRouter:
        router = APIRouter(tags=["responses"], responses=ERRORS, route_class=BodyRoute)
        stream: dict[int | str, dict[str, Any]] = {200: event_stream_of(ResponseEvent.__name__, last=None)}
        router.post("/responses", response_model=ResponseObject, responses=stream)(self.create)
        router.post("/responses/input_tokens")(self.count)
        router.get("/responses/{response_id}")(self.find)
        router.delete("/responses/{response_id}")(self.find)
        router.post("/responses/{response_id}/cancel")(self.find)
        router.get("/responses/{response_id}/input_items")(self.find)
        return router

    async def create(self, body: ResponsesRequest, request: Request) -> Response:
        used = await self._use(body.model, request)
        model = used.model
        self._leave_out(body)
        rules = self._settings.chat_rules
        request_id = body.request_id or request.state.request_id
        try:
            question = await self._texts.run(lambda: read_response(model, body, rules))
            question = self._cut(model, question, "max_output_tokens")
            form = ResponsesFormat(
                request_id,
                used.name,
                model.tokenizer,
                body,
                question.params[0],
                question.use,
                tokens_as_ids=self._settings.return_tokens_as_token_ids,
            )
            return await self._responder.respond(used, request, body, form, question)
        except ContextOverflow as error:
            if not body.stream:
                raise
            # As at OpenAI. Codex makes room in a full context when it reads this event; a 400 ends its turn.
            refused = ResponsesFormat(request_id, used.name, model.tokenizer, body, SamplingParams())
            return EventStream(named_events(refused.refusal(error)), lambda: None)

    async def count(self, body: ResponsesRequest, request: Request) -> InputTokens:
        """The number of tokens of the input of a request to /v1/responses."""
        model = (await self._use(body.model, request)).model
        self._leave_out(body)
        rules = self._settings.chat_rules

        def check(num_chars: int) -> None:
            check_length("input", num_chars, "characters", 8 * model.max_model_len)

        check(body.as_conversation.num_chars)
        prompt, _ = await self._texts.run(lambda: read_input(model, body, rules, check))
        return InputTokens(input_tokens=len(prompt.token_ids))

    def _leave_out(self, body: ResponsesRequest) -> None:
        leave_out(body.unsupported_tools, self._settings)
        note_ignored(body.unsupported_items)

    async def find(self, response_id: str) -> None:
        """404: nothing is stored."""
        message = f"There is no response {response_id!r}: this server keeps none, whatever `store` says."
        raise ApiError(404, message, code="response_not_found", param="response_id")
