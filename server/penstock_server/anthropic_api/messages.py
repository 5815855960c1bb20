"""/v1/messages and /v1/messages/count_tokens, for Claude Code and Anthropic's client packages."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock_server.answers.formats import ChatFormat, Extras
from penstock_server.anthropic_api.errors import MessageError
from penstock_server.anthropic_api.message_bodies import MessageBody, MessageEvent, TokenCount
from penstock_server.anthropic_api.messages_format import MessagesFormat
from penstock_server.anthropic_api.messages_request import MessagesRequest, PromptRequest
from penstock_server.prompts.inputs import refuse_long_text, refuse_overlong
from penstock_server.prompts.questions import count_tokens, read_chat, within_context
from penstock_server.routing.body_route import BodyRoute
from penstock_server.routing.checks import LEAST_LIMIT, leave_out, note_ignored
from penstock_server.routing.descriptions import errors_as, event_stream_of
from penstock_server.routing.generation_routes import GenerationRoutes


class MessagesRoutes(GenerationRoutes):
    def router(self) -> APIRouter:
        router = APIRouter(tags=["anthropic"], responses=errors_as(MessageError), route_class=BodyRoute)
        router.post(
            "/messages",
            response_model=MessageBody,
            responses={200: event_stream_of(MessageEvent.__name__, last=None)},
        )(self.create)
        router.post("/messages/count_tokens")(self.count)
        return router

    async def create(self, body: MessagesRequest, request: Request) -> Response:
        used = await self._use(body.model, request)
        model = used.model
        leave_out(body.unsupported_tools, self._settings)
        note_ignored(body.unsupported_blocks)
        chat, rules = body.as_chat, self._settings.chat_rules
        question = await self._texts.run(lambda: within_context(model, read_chat(model, chat, rules)))
        request_id, name = body.request_id or request.state.request_id, used.name
        read = ChatFormat(request_id, name, model.tokenizer, Extras(), question.prompts[0], question.use)
        form = MessagesFormat(request_id, name, read, body.max_tokens)
        return await self._responder.respond(used, request, chat, form, question)

    async def count(self, body: PromptRequest, request: Request) -> TokenCount:
        """The number of tokens of the prompt of a request to /v1/messages."""
        model = (await self._use(body.model, request)).model
        leave_out(body.unsupported_tools, self._settings)
        note_ignored(body.unsupported_blocks)
        rules = self._settings.chat_rules

        def check_length(num_chars: int) -> None:
            if num_chars > LEAST_LIMIT:
                refuse_long_text(model, num_chars)

        def check_text(text: str) -> None:
            if len(text) > max(LEAST_LIMIT, 8 * model.max_model_len):
                refuse_overlong(model, text)

        conversation = body.as_conversation
        number = await self._texts.run(
            lambda: count_tokens(model, conversation, rules, check_length, check_text)
        )
        return TokenCount(input_tokens=number)
