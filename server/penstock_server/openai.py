"""OpenAI's routes: models, completions, chat completions, with and without the prefix /v1.

A request goes through three steps: its prompts become token ids (on a thread of their own, because
a long text takes long), its fields become SamplingParams, and Answers runs all choices at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, TypedDict

from fastapi import APIRouter, Depends, Header, Request
from starlette.responses import Response

from penstock.async_engine import AsyncEngine
from penstock.engine import Engine
from penstock.generation.grammar import Grammar
from penstock.generation.sequence import SamplingParams
from penstock_server.answers import Answers
from penstock_server.errors import ApiError, ErrorBody
from penstock_server.formats import ChatFormat, CompletionFormat, Extras, Format
from penstock_server.inputs import (
    Prompt,
    choices,
    read_bad_words,
    read_messages,
    read_prompts,
    refuse_long_text,
    sampling_params,
)
from penstock_server.metrics import RequestMetrics
from penstock_server.operations import ready_engine
from penstock_server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from penstock_server.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Model,
    ModelList,
)
from penstock_server.responses_protocol import ResponsesRequest
from penstock_server.settings import Settings
from penstock_server.streaming import EventStream, unless_disconnected
from penstock_server.structured_outputs import read_grammar
from penstock_server.text_thread import TextThread
from penstock_server.tools.parsers import ParserChoice
from penstock_server.tools.use import ToolUse

#: What /v1/completions generates if the request does not say, as at OpenAI.
DEFAULT_MAX_TOKENS = 16

#: Most answers that one request may ask for, over all its prompts.
MAX_ANSWERS = 1024

#: Prompt tokens that it may have scored: with 20 likeliest tokens each takes some 3 kB.
MAX_SCORED_TOKENS = 1 << 17

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 413, 415, 500, 503)
}
# With a default described, FastAPI does not claim a 422 that we never send.
ERRORS["default"] = {"model": ErrorBody, "description": "Any other error"}


async def require_json(content_type: Annotated[str, Header(include_in_schema=False)] = "") -> None:
    """Raises 415 for bodies that don't claim to be JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"The content type is {kind or 'missing'!r}; send application/json."
        raise ApiError(415, message, code="unsupported_media_type")


class OpenAIRoutes:
    def __init__(
        self, engine: AsyncEngine, settings: Settings, metrics: RequestMetrics, texts: TextThread
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._texts = texts
        self._created = int(time.time())

    def router(self) -> APIRouter:
        router = APIRouter(tags=["openai"], responses=ERRORS)
        router.get("/models")(self.list_models)
        router.get("/models/{model:path}")(self.retrieve_model)
        for path, route, answer, chunk in (
            ("/completions", self.completions, Completion, Completion),
            ("/chat/completions", self.chat_completions, ChatCompletion, ChatCompletionChunk),
        ):
            router.post(
                path,
                response_model=answer,
                dependencies=[Depends(require_json)],
                responses={200: event_stream_of(chunk.__name__)},
            )(route)
        return router

    # -- models ---------------------------------------------------------------------------------

    async def list_models(self) -> ModelList:
        """Answers while the model loads, too."""
        return ModelList(data=[self._model(name) for name in self._settings.model_names])

    async def retrieve_model(self, model: str) -> Model:
        check_model(model, self._settings)
        return self._model(model)

    def _model(self, name: str) -> Model:
        is_ready = self._engine.status.state == "ready"
        return Model(
            id=name,
            created=self._created,
            root=self._settings.model_names[0],
            max_model_len=self._engine.engine.max_model_len if is_ready else None,
        )

    # -- generation -----------------------------------------------------------------------------

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        check_model(body.model, self._settings)
        engine = ready_engine(self._engine)
        self._check_num_answers(len(body.prompts) * body.num_choices)
        refuse_long_text(engine, body)
        prompts, params = await self._texts.run(lambda: read_completion(engine, body))
        form = CompletionFormat(
            body.request_id or request.state.request_id,
            self._settings.model_names[0],
            engine.tokenizer,
            replace(self._extras(body), logprobs=body.logprobs, echo=bool(body.echo)),
            [prompt for prompt in prompts for _ in params],
        )
        return await self.respond(request, body, form, prompts, params, bool(body.return_token_ids))

    async def chat_completions(self, body: ChatCompletionRequest, request: Request) -> Response:
        check_model(body.model, self._settings)
        engine = ready_engine(self._engine)
        self._check_num_answers(body.num_choices)
        refuse_long_text(engine, body)
        parser = self._settings.tool_call_parser
        prompt, params, use = await self._texts.run(lambda: read_chat(engine, body, parser))
        form = ChatFormat(
            body.request_id or request.state.request_id,
            self._settings.model_names[0],
            engine.tokenizer,
            replace(self._extras(body), logprobs=body.num_logprobs),
            prompt,
            use if use.parser() else None,
        )
        return await self.respond(request, body, form, [prompt], params, bool(body.return_token_ids), use)

    async def respond(
        self,
        request: Request,
        body: GenerationRequest | ResponsesRequest,
        form: Format,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        tells_end_token: bool = False,
        tools: ToolUse | None = None,
    ) -> Response:
        """All answers, whole or as they come, for any route."""
        token_ids = [prompt.token_ids for prompt in prompts]
        _check_scored(sum(map(len, token_ids)) * len(params), params[0])
        answers = Answers(
            self._engine,
            self._metrics,
            token_ids,
            params,
            checked_priority(body.priority, self._settings),
            body.cache_salt or "",
            tells_end_token=tells_end_token,
            ending=tools.ending if tools else lambda: None,
        )
        if body.stream:
            idle_s = self._settings.sse_keep_alive or None
            return EventStream(form.events(answers, idle_s), answers.close)
        try:
            await unless_disconnected(request.receive, answers.finish())
        finally:
            answers.close()
        # Logprobs of a long prompt are megabytes of JSON, which the event loop must not wait for.
        content = await asyncio.to_thread(lambda: form.whole(answers).model_dump_json())
        return Response(content, media_type="application/json")

    def _extras(self, body: GenerationRequest) -> Extras:
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

    def _check_num_answers(self, num_answers: int) -> None:
        """Raises 400 for more than could ever be taken."""
        limit = min(MAX_ANSWERS, self._engine.max_requests)
        if num_answers > limit:
            message = f"{num_answers} answers are asked for, prompts times n; there may be {limit} at a time."
            raise ApiError(400, message, code="invalid_value", param="n")


def check_model(name: str | None, settings: Settings) -> None:
    """Raises 404 for a name that this server does not have."""
    names = settings.model_names
    # What the server was started with is a name, too, though no list shows it.
    if name not in (None, settings.model, *names):
        message = f"There is no model {name!r} here; this server has {' and '.join(names)}."
        raise ApiError(404, message, code="model_not_found", param="model")


def _check_scored(num_positions: int, params: SamplingParams) -> None:
    """Raises 400 where log-probabilities of prompts, told with each choice, would fill the memory."""
    if params.prompt_logprobs is not None and num_positions > MAX_SCORED_TOKENS:
        message = (
            f"Log-probabilities of {num_positions} prompt tokens are asked for, prompts times choices; "
            f"one request may ask for {MAX_SCORED_TOKENS}. Send fewer prompts at a time, or a smaller n."
        )
        raise ApiError(400, message, code="invalid_value", param="prompt")


def checked_priority(priority: int | None, settings: Settings) -> int:
    """Raises 400 where priorities don't count: anybody could put himself before all others."""
    if priority and settings.scheduling_policy != "priority":
        message = "priority has no effect here; leave it out, or start with --scheduling-policy priority."
        raise ApiError(400, message, code="unsupported_parameter", param="priority")
    return priority or 0


class Constraints(TypedDict):
    """What a request demands of an answer's tokens, as sampling_params() takes it."""

    bad_words: tuple[tuple[int, ...], ...]
    grammar: Grammar | None


def read_completion(engine: Engine, body: CompletionRequest) -> tuple[list[Prompt], list[SamplingParams]]:
    """Takes a while, for long texts and large grammars: not for the event loop."""
    prompts = read_prompts(engine, body)
    room = engine.max_model_len - max(len(prompt.token_ids) for prompt in prompts)
    usual = max(1, min(DEFAULT_MAX_TOKENS, room))
    num_scored = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        num_scored = max(body.logprobs, num_scored or 0)
    params = sampling_params(
        body,
        engine.default_sampling,
        usual if body.max_tokens is None else body.max_tokens,
        body.logprobs,
        num_scored,
        **read_constraints(engine, body),
    )
    return prompts, choices(params, body.num_choices)


def read_chat(
    engine: Engine, body: ChatCompletionRequest, parser: ParserChoice
) -> tuple[Prompt, list[SamplingParams], ToolUse]:
    """The same."""
    use = ToolUse.of(body, engine.tokenizer, parser)
    prompt = read_messages(engine, body, use)
    params = sampling_params(
        body,
        engine.default_sampling,
        body.answer_tokens,
        body.num_logprobs,
        body.prompt_logprobs,
        **read_constraints(engine, body),
    )
    params = use.bind(params)
    use.check(engine, params.grammar)
    return prompt, choices(params, body.num_choices), use


def read_constraints(engine: Engine, body: GenerationRequest) -> Constraints:
    return {
        "bad_words": read_bad_words(engine.tokenizer, body.bad_words or ()),
        "grammar": read_grammar(engine, body),
    }


def event_stream_of(model: str, last: str | None = "[DONE]") -> dict[str, Any]:
    """OpenAPI's description of an answer that may also be a stream of `model` objects, or of an error.

    last: the data of the last event, if it is no object.
    """
    objects = [{"$ref": f"#/components/schemas/{name}"} for name in (model, "ErrorBody")]
    encoded = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": objects}}
    data = encoded if last is None else {"anyOf": [{"const": last}, encoded]}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {"content": {"text/event-stream": {"itemSchema": event}}}
