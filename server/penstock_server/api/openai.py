"""OpenAI's routes that generate: completions and chat completions, with and without the prefix /v1.

A request goes through three steps. Its prompts become token ids, on the text thread, because a long text
takes long. Its fields become SamplingParams. The responder runs all choices at once.
"""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock_server.answers.formats import ChatFormat, CompletionFormat, Extras
from penstock_server.prompts.inputs import refuse_endless_text, refuse_long_text
from penstock_server.prompts.questions import read_chat, read_completion
from penstock_server.protocol.answer_bodies import ChatCompletion, ChatCompletionChunk, Completion
from penstock_server.protocol.generation_fields import GenerationFields
from penstock_server.protocol.requests import ChatCompletionRequest, CompletionRequest
from penstock_server.routing.body_route import BodyRoute
from penstock_server.routing.descriptions import ERRORS, event_stream_of
from penstock_server.routing.generation_routes import GenerationRoutes


class OpenAIRoutes(GenerationRoutes):
    def router(self) -> APIRouter:
        router = APIRouter(tags=["openai"], responses=ERRORS, route_class=BodyRoute)
        for path, route, answer, chunk in (
            ("/completions", self.completions, Completion, Completion),
            ("/chat/completions", self.chat_completions, ChatCompletion, ChatCompletionChunk),
        ):
            router.post(
                path,
                response_model=answer,
                responses={200: event_stream_of(chunk.__name__)},
            )(route)
        return router

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        used = await self._use(body.model, request)
        model = used.model
        self._responder.check_num_answers(used, body.num_prompts * body.num_choices)
        refuse = refuse_long_text if body.truncate_prompt_tokens is None else refuse_endless_text
        refuse(model, body.num_prompt_chars)
        question = self._cut(model, await self._texts.run(lambda: read_completion(model, body)))
        form = CompletionFormat(
            body.request_id or request.state.request_id,
            used.name,
            model.tokenizer,
            replace(self._extras(body), logprobs=body.logprobs, echo=bool(body.echo)),
            [prompt for prompt in question.prompts for _ in question.params],
        )
        return await self._responder.respond(used, request, body, form, question, bool(body.return_token_ids))

    async def chat_completions(self, body: ChatCompletionRequest, request: Request) -> Response:
        used = await self._use(body.model, request)
        model = used.model
        self._responder.check_num_answers(used, body.num_choices)
        rules = self._settings.chat_rules
        question = await self._texts.run(lambda: read_chat(model, body, rules))
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        question = self._cut(model, question, field)
        form = ChatFormat(
            body.request_id or request.state.request_id,
            used.name,
            model.tokenizer,
            replace(self._extras(body), logprobs=body.num_logprobs),
            question.prompts[0],
            question.use,
        )
        return await self._responder.respond(used, request, body, form, question, bool(body.return_token_ids))

    def _extras(self, body: GenerationFields) -> Extras:
        settings = self._settings
        is_forced = settings.enable_force_include_usage
        as_ids = body.return_tokens_as_token_ids
        return Extras(
            usage=is_forced or body.wants_usage_chunk,
            continuous_usage=is_forced or body.wants_continuous_usage,
            prompt_logprobs=body.prompt_logprobs,
            tokens_as_ids=settings.return_tokens_as_token_ids if as_ids is None else as_ids,
            token_ids=bool(body.return_token_ids),
        )
