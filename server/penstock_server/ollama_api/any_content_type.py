"""JSON under any content type, as Ollama reads it: `curl -d '{...}'` says that it sends a form."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response

from penstock_server.routing.body_route import BodyRoute


class JsonRoute(BodyRoute):
    """Requests that a web page makes keep their content type: a page of another origin may send forms without
    being asked for its origin, and a content type that no form has stops it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def answer_json(request: Request) -> Response:
            if "origin" not in request.headers:
                MutableHeaders(scope=request.scope)["content-type"] = "application/json"
                request = Request(request.scope, request.receive)
            return await answer(request)

        return answer_json
