"""create_app: the routes, what stands before them, and the engine's life around them.

The three layers before the routes are plain ASGI: Starlette's BaseHTTPMiddleware would hide from a
route that its client has left.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.async_engine import AsyncEngine
from penstock.errors import PenstockError
from penstock_server import __version__
from penstock_server.errors import ApiError, api_error
from penstock_server.metrics import RequestMetrics
from penstock_server.openai import OpenAIRoutes
from penstock_server.operations import OPEN_PATHS, STATS_PATH, OperationRoutes
from penstock_server.page import UI_PATH, page_routes
from penstock_server.responses import ChatCompletionChunk
from penstock_server.settings import Settings

logger = logging.getLogger(__name__)

#: Paths (and what is below them) that need no API key; nor does the page itself, because a browser can't
#: send one for a page.
_NO_KEY = (*OPEN_PATHS, UI_PATH)

#: nginx's status for a client that left before its answer; only logs see it.
CLIENT_CLOSED_REQUEST = 499


def create_app(engine: AsyncEngine, settings: Settings) -> FastAPI:
    """The application over an engine that is not started: the application starts and stops it."""
    metrics = RequestMetrics(settings.model_names[0], engine)
    openai = OpenAIRoutes(engine, settings, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        engine.start()
        try:
            yield
        finally:
            await engine.stop()
            openai.close()

    app = FastAPI(title="Penstock", version=__version__, lifespan=lifespan)
    app.include_router(OperationRoutes(engine, metrics).router())
    routes = openai.router()
    app.include_router(routes, prefix="/v1")
    app.include_router(routes, include_in_schema=False)
    if settings.ui:
        app.router.routes.extend(page_routes())
    for kind in (HTTPException, RequestValidationError, PenstockError):
        app.add_exception_handler(kind, _answer_error)
    # The last one added is the first to see a request.
    app.add_middleware(BodyLimit, max_bytes=settings.max_request_size)
    app.add_middleware(ApiKeys, keys=settings.api_key)
    app.add_middleware(RequestContext)
    _describe_chunks(app)
    return app


async def _answer_error(_: Request, error: Exception) -> Response:
    return api_error(error).response()


def _describe_chunks(app: FastAPI) -> None:
    """Adds the chat chunk to the OpenAPI document: FastAPI finds only whole answers by itself."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        document = describe()
        schemas = document["components"]["schemas"]
        chunk = ChatCompletionChunk.model_json_schema(ref_template="#/components/schemas/{model}")
        for name, schema in chunk.pop("$defs").items():
            schemas.setdefault(name, schema)
        schemas.setdefault(ChatCompletionChunk.__name__, chunk)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


class RequestContext:
    """Outermost: gives each request an id, logs its end, and answers what no one else caught."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id", ""))
        scope.setdefault("state", {})["request_id"] = request_id
        start, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = CLIENT_CLOSED_REQUEST
        except Exception as error:
            if status:  # too late to say so
                raise
            await api_error(error).response()(scope, receive, send_with_id)
        finally:
            _log(scope, status, time.monotonic() - start, request_id)


def _request_id(given: str) -> str:
    """The client's own id, if it can stand in a header and a log line."""
    return given if re.fullmatch(r"[\w.:/+=-]{1,128}", given, re.ASCII) else uuid.uuid4().hex


def _log(scope: Scope, status: int, duration_s: float, request_id: str) -> None:
    """A line per request; those of probes, scrapers and the page's view of the engine only for debugging."""
    is_probe = scope["path"].startswith((*OPEN_PATHS, "/metrics", STATS_PATH))
    level = logging.DEBUG if is_probe else logging.INFO
    line = "%s %s %d %.3f s %s"
    logger.log(level, line, scope["method"], repr(scope["path"])[1:-1], status, duration_s, request_id)


class ApiKeys:
    """Refuses requests without one of the keys, except for OPEN_PATHS, the web page and CORS preflights."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        # Digests have one length, so that a comparison takes the same time whatever is sent.
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and not self._is_allowed(scope):
            error = ApiError(
                401,
                "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if scope["method"] == "OPTIONS" or _is_open(scope["path"]):
            return True
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        sent = _digest(key.strip())
        matches = [secrets.compare_digest(sent, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _is_open(path: str) -> bool:
    return path == "/" or any(path == each or path.startswith(each + "/") for each in _NO_KEY)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class BodyLimit:
    """Answers 413 to a request whose body is larger than `max_bytes`, before it is read whole."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length) > self._max_bytes:
            await self._too_large().response()(scope, receive, send)
            return
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, receive_limited, send)

    def _too_large(self) -> ApiError:
        message = f"The request is larger than {self._max_bytes} bytes."
        return ApiError(413, message, code="request_too_large")
