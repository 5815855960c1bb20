"""OpenAI's routes: models, completions, chat completions, with and without the prefix /v1.

A request goes through three steps: its prompts become token ids (on a thread of their own, because
a long text takes long), its fields become SamplingParams, and Answers runs all choices at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Header, Request
from starlette.responses import Response

from penstock.async_engine import AsyncEngine
from penstock.generation.sequence import SamplingParams
from penstock_server.answers import Answers
from penstock_server.errors import ApiError, ErrorBody
from penstock_server.formats import ChatFormat, CompletionFormat, Format, stream
from penstock_server.inputs import Prompt, read_messages, read_prompts, sampling_params
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
from penstock_server.settings import Settings
from penstock_server.streaming import EventStream, events, unless_disconnected
from penstock_server.structured_outputs import read_grammar
from penstock_server.tools.use import ToolUse

T = TypeVar("T")

#: What /v1/completions generates if the request does not say, as at OpenAI.
DEFAULT_MAX_TOKENS = 16

#: Most answers that one request may ask for, over all its prompts.
MAX_ANSWERS = 1024

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 413, 415, 500, 503)
}
# With a default described, FastAPI does not claim a 422 that we never send.
_ERRORS["default"] = {"model": ErrorBody, "description": "Any other error"}


async def require_json(content_type: Annotated[str, Header(include_in_schema=False)] = "") -> None:
    """Raises 415 for bodies that don't claim to be JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"The content type is {kind or 'missing'!r}; send application/json."
        raise ApiError(415, message, code="unsupported_media_type")


class OpenAIRoutes:
    def __init__(self, engine: AsyncEngine, settings: Settings, metrics: RequestMetrics) -> None:
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._created = int(time.time())
        # One thread: tokenizers are not made for several at once.
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix="text")

    def router(self) -> APIRouter:
        router = APIRouter(tags=["openai"], responses=_ERRORS)
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

    def close(self) -> None:
        self._text_thread.shutdown(wait=False, cancel_futures=True)

    # -- models ---------------------------------------------------------------------------------

    async def list_models(self) -> ModelList:
        """Answers while the model loads, too."""
        return ModelList(data=[self._model(name) for name in self._settings.model_names])

    async def retrieve_model(self, model: str) -> Model:
        self._check_model(model)
        return self._model(model)

    def _model(self, name: str) -> Model:
        is_ready = self._engine.status.state == "ready"
        return Model(
            id=name,
            created=self._created,
            root=self._settings.model_names[0],
            max_model_len=self._engine.engine.max_model_len if is_ready else None,
        )

    def _check_model(self, name: str | None) -> None:
        names = self._settings.model_names
        # What the server was started with is a name, too, though no list shows it.
        if name not in (None, self._settings.model, *names):
            message = f"There is no model {name!r} here; this server has {' and '.join(names)}."
            raise ApiError(404, message, code="model_not_found", param="model")

    # -- generation -----------------------------------------------------------------------------

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        self._check_model(body.model)
        engine = ready_engine(self._engine)
        self._check_num_answers(len(body.prompts) * body.num_choices)
        prompts = await self._on_text_thread(lambda: read_prompts(engine, body))
        grammar = await self._on_text_thread(lambda: read_grammar(engine, body))
        room = engine.max_model_len - max(len(prompt.token_ids) for prompt in prompts)
        max_tokens = body.max_tokens or max(1, min(DEFAULT_MAX_TOKENS, room))
        params = sampling_params(body, engine.default_sampling, max_tokens, body.logprobs, grammar)
        form = CompletionFormat(
            request.state.request_id,
            self._settings.model_names[0],
            engine.tokenizer,
            body.wants_usage_chunk,
            body.logprobs is not None,
            [prompt.text for prompt in prompts for _ in params] if body.echo else (),
        )
        return await self._respond(request, body, form, prompts, params)

    async def chat_completions(self, body: ChatCompletionRequest, request: Request) -> Response:
        self._check_model(body.model)
        engine = ready_engine(self._engine)
        self._check_num_answers(body.num_choices)
        use = ToolUse.of(body, engine.tokenizer, self._settings.tool_call_parser)
        prompt = await self._on_text_thread(lambda: read_messages(engine, body, use))
        grammar = await self._on_text_thread(lambda: read_grammar(engine, body))
        max_tokens = body.max_completion_tokens or body.max_tokens
        params = sampling_params(body, engine.default_sampling, max_tokens, body.num_logprobs, grammar)
        params = [use.bind(each) for each in params]
        await self._on_text_thread(lambda: use.check(engine, params[0].grammar))
        form = ChatFormat(
            request.state.request_id,
            self._settings.model_names[0],
            engine.tokenizer,
            body.wants_usage_chunk,
            bool(body.logprobs),
            use if use.parser() else None,
        )
        return await self._respond(request, body, form, [prompt], params)

    async def _respond(
        self,
        request: Request,
        body: GenerationRequest,
        form: Format,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
    ) -> Response:
        token_ids = [prompt.token_ids for prompt in prompts]
        answers = Answers(self._engine, self._metrics, token_ids, params)
        if body.stream:
            idle_s = self._settings.sse_keep_alive or None
            chunks = stream(form, answers, body.wants_usage_chunk, idle_s)
            return EventStream(events(chunks), answers.close)
        try:
            await unless_disconnected(request.receive, answers.finish())
        finally:
            answers.close()
        return Response(form.whole(answers).model_dump_json(), media_type="application/json")

    def _check_num_answers(self, num_answers: int) -> None:
        """Raises 400 for more than could ever be taken."""
        limit = min(MAX_ANSWERS, self._engine.max_requests)
        if num_answers > limit:
            message = f"{num_answers} answers are asked for, prompts times n; there may be {limit} at a time."
            raise ApiError(400, message, code="invalid_value", param="n")

    async def _on_text_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._text_thread, work)


def event_stream_of(model: str) -> dict[str, Any]:
    """OpenAPI's description of an answer that may also be a stream of `model` objects."""
    schema = {"$ref": f"#/components/schemas/{model}"}
    return {"content": {"text/event-stream": {"itemSchema": schema}}}
