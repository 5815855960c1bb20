"""/api/chat and /api/generate."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from penstock_server.answers.formats import ChatFormat, Extras
from penstock_server.models.pooled_model import ModelInUse
from penstock_server.ollama_api.any_content_type import JsonRoute
from penstock_server.ollama_api.bodies import Answered, ChatAnswer, GenerateAnswer
from penstock_server.ollama_api.errors import OllamaError
from penstock_server.ollama_api.lines_format import MEDIA_TYPE, LinesFormat
from penstock_server.ollama_api.names import known_name
from penstock_server.ollama_api.requests import NO_OPTIONS, ChatRequest, GenerateRequest, GeneratingRequest
from penstock_server.prompts.inputs import refuse_long_text
from penstock_server.prompts.questions import (
    Question,
    read_chat,
    read_completion,
    read_fitting_chat,
    within_context,
)
from penstock_server.protocol.requests import ChatCompletionRequest, CompletionRequest
from penstock_server.routing.checks import known_model, note_ignored
from penstock_server.routing.descriptions import errors_as, line_stream_of
from penstock_server.routing.generation_routes import GenerationRoutes


class OllamaRoutes(GenerationRoutes):
    def router(self) -> APIRouter:
        router = APIRouter(tags=["ollama"], responses=errors_as(OllamaError), route_class=JsonRoute)
        for path, route, answer in (
            ("/chat", self.chat, ChatAnswer),
            ("/generate", self.generate, GenerateAnswer),
        ):
            router.post(
                path,
                response_model=answer,
                responses={200: line_stream_of(answer.__name__)},
            )(route)
        return router

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        if not body.messages:
            reason = await self._load(body, request)
            return _loaded(ChatAnswer(model=body.model, done=True, done_reason=reason))
        used = await self._ready(body, request)
        model = used.model
        chat, rules = body.as_chat, self._settings.chat_rules

        read = read_chat if body.truncate is False else read_fitting_chat
        return await self._answer(request, used, chat, lambda: read(model, chat, rules), is_chat=True)

    async def generate(self, body: GenerateRequest, request: Request) -> Response:
        if not body.prompt and not body.suffix:
            reason = await self._load(body, request)
            return _loaded(GenerateAnswer(model=body.model, done=True, done_reason=reason))
        used = await self._ready(body, request)
        model = used.model
        refuse_long_text(model, len(body.prompt or "") + len(body.suffix or ""))
        if body.raw or body.suffix or not model.tokenizer.has_chat_template:
            completion = body.as_completion
            return await self._answer(request, used, completion, lambda: read_completion(model, completion))
        chat, rules = body.as_chat, self._settings.chat_rules
        return await self._answer(request, used, chat, lambda: read_chat(model, chat, rules))

    async def _ready(self, body: GeneratingRequest, request: Request) -> ModelInUse:
        used = await self._use(known_name(body.model, self._models), request, body.keep_alive_s)
        note_ignored((body.options or NO_OPTIONS).ignored(used.model.max_model_len))
        return used

    async def _load(self, body: GeneratingRequest, request: Request) -> str:
        """Loads the model for a request that asks for nothing else, or lets the model go if the request keeps
        it for no time; a pinned model stays. Returns which, in Ollama's words."""
        model = known_model(self._models, known_name(body.model, self._models))
        if body.keep_alive_s == 0 and self._models.swaps and not model.is_pinned:
            self._models.retire(model)
            return "unload"
        await self._ready(body, request)
        return "load"

    async def _answer(
        self,
        request: Request,
        used: ModelInUse,
        body: ChatCompletionRequest | CompletionRequest,
        read: Callable[[], Question],
        is_chat: bool = False,
    ) -> Response:
        question = await self._texts.run(lambda: within_context(used.model, read()))
        name, num_logprobs = used.name, question.params[0].logprobs
        reader = ChatFormat(
            request.state.request_id,
            name,
            used.model.tokenizer,
            Extras(logprobs=num_logprobs),
            question.prompts[0],
            question.use,
        )
        form = LinesFormat(name, reader, is_chat)
        return await self._responder.respond(used, request, body, form, question, media_type=MEDIA_TYPE)


def _loaded(answer: Answered) -> Response:
    return JSONResponse(answer.model_dump())
