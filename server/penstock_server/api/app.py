"""create_app: the routes, the middleware in front of the routes, and the start and stop of the engine.

The middleware is plain ASGI: with Starlette's BaseHTTPMiddleware a route could not see that its client has
left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

from penstock.errors import PenstockError
from penstock_server import __version__
from penstock_server.answers.responses_format import ResponseEvent
from penstock_server.anthropic_api.errors import message_error
from penstock_server.anthropic_api.message_bodies import MessageEvent
from penstock_server.anthropic_api.messages import MessagesRoutes
from penstock_server.api.adapters import AdapterRoutes
from penstock_server.api.filling import FillRoutes
from penstock_server.api.models import ModelRoutes
from penstock_server.api.openai import OpenAIRoutes
from penstock_server.api.operations import OperationRoutes
from penstock_server.api.page import page_routes
from penstock_server.api.responses import ResponsesRoutes
from penstock_server.api.tokenization import TokenizationRoutes
from penstock_server.facade.engine import ServedEngine
from penstock_server.facade.request_memory import request_memory_bytes
from penstock_server.middleware.access import ApiKeys, read_keys
from penstock_server.middleware.body_budget import BodyBudget
from penstock_server.middleware.body_limit import BodyLimit
from penstock_server.middleware.draining import Drain, DrainMiddleware
from penstock_server.middleware.error_forms import ErrorForms
from penstock_server.middleware.freed_memory import ReturnMemory
from penstock_server.middleware.head_requests import HeadAsGet
from penstock_server.middleware.host_check import HostCheck, allowed_hosts
from penstock_server.middleware.path_form import PathForm
from penstock_server.middleware.rate_limit import RateLimit
from penstock_server.middleware.request_context import RequestContext
from penstock_server.models.served_models import OneModel, ServedModels
from penstock_server.ollama_api.catalog import CatalogRoutes
from penstock_server.ollama_api.embedding import OllamaEmbeddingRoutes
from penstock_server.ollama_api.errors import ollama_error
from penstock_server.ollama_api.generating import OllamaRoutes
from penstock_server.pooling_api.embeddings import EmbeddingRoutes
from penstock_server.pooling_api.ranking import RankingRoutes
from penstock_server.prompts.text_thread import TextThread
from penstock_server.protocol.answer_bodies import ChatCompletionChunk
from penstock_server.protocol.errors import ApiError, api_error, routing_error
from penstock_server.protocol.fill_bodies import FillChunk
from penstock_server.routing.body_route import BodyReader
from penstock_server.routing.responder import Responder
from penstock_server.settings.settings import Settings
from penstock_server.telemetry.metrics import RequestMetrics
from penstock_server.telemetry.request_info import TimeLimits
from penstock_server.telemetry.tracing import RequestTracer

#: Headers of answers that a script of another origin may read.
_EXPOSED_HEADERS = (
    "X-Request-Id",
    "Retry-After",
    *(
        f"x-ratelimit-{what}-{of}"
        for what in ("limit", "remaining", "reset")
        for of in ("requests", "tokens")
    ),
)

OLLAMA_PATH = "/api"
#: By the beginnings of paths: the errors of APIs that are not OpenAI's.
_ERROR_FORMS = {"/v1/messages": message_error, "/messages": message_error, OLLAMA_PATH: ollama_error}


def create_app(
    served: ServedModels | ServedEngine, settings: Settings, drain: Drain | None = None
) -> FastAPI:
    """The application over models (or the engine of one) that are not started yet: the application starts
    and stops them.

    drain: by this object the server stops gently. Raises ConfigError for settings that can't be followed.
    """
    drain = drain or Drain()
    models = OneModel(served, settings) if isinstance(served, ServedEngine) else served
    metrics = RequestMetrics(models)
    texts = TextThread()
    responder = Responder(settings, metrics)
    bodies = BodyReader(settings.max_request_size, settings.lenient, always_lenient=f"{OLLAMA_PATH}/")
    endpoint = settings.otlp_traces_endpoint
    tracer = RequestTracer(endpoint, models.names[0]) if endpoint else None

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        models.start()
        try:
            yield
        finally:
            await models.stop()
            texts.close()
            bodies.close()
            if tracer is not None:
                await asyncio.to_thread(tracer.close)

    # FastAPI's documentation pages are off: they load scripts from other servers, and those scripts could
    # read the API key that our page keeps.
    app = FastAPI(title="Penstock", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.bodies = bodies
    app.router.redirect_slashes = False
    operations = OperationRoutes(models, metrics, lambda: drain.is_draining, lambda: drain.num_open).router()
    app.include_router(operations)
    paths = [route.path for route in operations.routes if isinstance(route, Route)]
    paths += _add_apis(app, models, settings, texts, responder)
    if settings.ui:
        app.router.routes.extend(page_routes())

    _answer_errors(app, paths)
    _add_layers(app, settings, metrics, drain, tracer)
    app.servers = [{"url": settings.root_path}] if settings.root_path else []
    _describe_chunks(app)
    return app


def _add_apis(
    app: FastAPI, models: ServedModels, settings: Settings, texts: TextThread, responder: Responder
) -> list[str]:
    """Adds the APIs of OpenAI, Anthropic, Cohere and Ollama, and ours. Returns the paths below /v1."""
    ranking = RankingRoutes(models, settings, texts, responder)
    paths = []
    for routes in (
        ModelRoutes(models).router(),
        OpenAIRoutes(models, settings, texts, responder).router(),
        ResponsesRoutes(models, settings, texts, responder).router(),
        FillRoutes(models, settings, texts, responder).router(),
        MessagesRoutes(models, settings, texts, responder).router(),
        TokenizationRoutes(models, settings, texts).router(),
        EmbeddingRoutes(models, settings, texts, responder).router(),
        ranking.router(),
        *([AdapterRoutes(models).router()] if settings.allow_runtime_lora_updating else []),
    ):
        app.include_router(routes, prefix="/v1")
        app.include_router(routes, include_in_schema=False)
        paths += ["/v1" + route.path for route in routes.routes if isinstance(route, Route)]
    app.include_router(ranking.cohere_router())
    for routes in (
        OllamaRoutes(models, settings, texts, responder).router(),
        OllamaEmbeddingRoutes(models, settings, texts, responder).router(),
        CatalogRoutes(models).router(),
    ):
        app.include_router(routes, prefix=OLLAMA_PATH)
    return paths


def _answer_errors(app: FastAPI, paths: Sequence[str]) -> None:
    """Errors become answers in OpenAI's form; for an unknown path, the answer names similar `paths`."""

    async def answer_error(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and not isinstance(error, ApiError):
            error = routing_error(error, request.method, request.scope["path"], paths)
        return api_error(error).response()

    for kind in (HTTPException, RequestValidationError, PenstockError):
        app.add_exception_handler(kind, answer_error)


def _add_layers(
    app: FastAPI, settings: Settings, metrics: RequestMetrics, drain: Drain, tracer: RequestTracer | None
) -> None:
    """Adds the middleware from the inside out: a request passes the layer first that is added last."""
    app.add_middleware(HeadAsGet)
    app.add_middleware(ReturnMemory)
    app.add_middleware(
        BodyLimit,
        max_bytes=settings.max_request_size,
        timeout_s=settings.request_body_timeout,
        budget=BodyBudget(request_memory_bytes(settings)),
    )
    if settings.rate_limit_requests or settings.rate_limit_tokens:
        app.add_middleware(
            RateLimit,
            requests=settings.rate_limit_requests,
            tokens=settings.rate_limit_tokens,
            count_rejected=metrics.count_rejected,
        )
    app.add_middleware(ApiKeys, keys=read_keys(settings), has_open_metrics=settings.open_metrics)
    app.add_middleware(DrainMiddleware, drain=drain, count_rejected=metrics.count_rejected)
    if settings.allowed_origin:  # outside of keys and limits, so that scripts can read their refusals too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origin,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=_EXPOSED_HEADERS,
        )
    app.add_middleware(HostCheck, allowed=allowed_hosts(settings))
    limits = TimeLimits(settings.queue_timeout or None, settings.request_timeout or None)
    app.add_middleware(RequestContext, metrics=metrics.http, tracer=tracer, limits=limits)
    app.add_middleware(ErrorForms, forms=_ERROR_FORMS)
    app.add_middleware(PathForm, prefix=settings.root_path)


def _describe_chunks(app: FastAPI) -> None:
    """Adds the chunks of streams to the OpenAPI document: FastAPI by itself finds whole answers only."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        document = describe()
        schemas = document["components"]["schemas"]
        for model in (ChatCompletionChunk, FillChunk, ResponseEvent, MessageEvent):
            chunk = model.model_json_schema(ref_template="#/components/schemas/{model}")
            for name, schema in chunk.pop("$defs", {}).items():
                schemas.setdefault(name, schema)
            schemas.setdefault(model.__name__, chunk)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
