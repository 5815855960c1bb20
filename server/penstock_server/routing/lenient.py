"""--lenient: a request with unknown fields is answered as if it had none of them.

Requests are validated strictly first, so that leniency costs nothing where nothing is unknown."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from penstock_server.telemetry.request_info import current_request

Path = tuple[str | int, ...]


def answer_without_unknown(request: Request, error: Exception) -> Response | None:
    """The answer to the request without its unknown fields, whose names go to the RequestInfo. None: the
    error has another reason."""
    if not isinstance(error, RequestValidationError) or not isinstance(error.body, dict):
        return None
    unknown = [each["loc"][1:] for each in error.errors() if each["type"] == "extra_forbidden"]
    found = {path for each in unknown if (path := path_in(each, error.body)) is not None}
    route = request.scope.get("route")
    if not found or route is None:
        return None
    body = copy.deepcopy(error.body)
    for path in sorted(found, key=len, reverse=True):
        _delete(body, path)
    if (info := current_request.get()) is not None:
        info.ignored += sorted(".".join(map(str, path)) for path in found)
    return _Replay(route.app, json.dumps(body).encode())


def path_in(location: Sequence[str | int], body: Any) -> Path | None:
    """The path of the unknown field that pydantic found at `location`, which also has names of union members:
    the steps that lead through `body` to the last step. None if there is no such path."""
    step, *rest = location
    is_key = isinstance(body, dict) and step in body
    is_index = isinstance(body, list) and isinstance(step, int) and step < len(body)
    if not rest:
        return (step,) if is_key else None
    if (is_key or is_index) and (behind := path_in(rest, body[step])) is not None:
        return (step, *behind)
    return path_in(rest, body)


def _delete(body: Any, path: Path) -> None:
    for step in path[:-1]:
        body = body[step]
    del body[path[-1]]


class _Replay(Response):
    """The answer of a route that reads another body than the client sent."""

    def __init__(self, route: Any, body: bytes) -> None:
        self._route = route
        self._new_body = body
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_sent = False

        async def receive_new() -> Message:
            nonlocal is_sent
            if is_sent:
                return await receive()
            is_sent = True
            return {"type": "http.request", "body": self._new_body, "more_body": False}

        await self._route(scope, receive_new, send)
