"""BodyRoute: a route whose body is read within limits, and not on the event loop if it is large."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from penstock_server.middleware.body_budget import BodyShare
from penstock_server.protocol.body_validator import BodyValidator
from penstock_server.protocol.errors import ApiError
from penstock_server.protocol.json_text import JsonTooCostly, cost_of, read_body
from penstock_server.routing.checks import note_ignored, require_json

#: A body up to this size is read on the event loop: it takes few milliseconds, whatever it holds.
_SMALL_BYTES = 1 << 15
#: Memory that the values of a body may take, by the largest size of a body. With the body itself it is four
#: times this size. A server that takes only small bodies still has room for the values of one of them.
_MEMORY_FACTOR, _LEAST_MEMORY = 3, 16 << 20

T = TypeVar("T")

_validator = cache(BodyValidator)


class BodyReader:
    """Makes the bodies of an application's requests of JSON."""

    def __init__(self, max_body_bytes: int, is_lenient: bool, always_lenient: str) -> None:
        """is_lenient: unknown fields are left out, and notes stand for parts that are no text; both are noted
        in the header. Unknown fields always are on paths that begin with `always_lenient`."""
        self._most_bytes = max(_MEMORY_FACTOR * max_body_bytes, _LEAST_MEMORY)
        self._is_lenient = is_lenient
        self._always_lenient = always_lenient
        # One thread: several large bodies one after the other take no longer, and less memory at a time.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    async def read(self, request: Request, kind: type[BaseModel]) -> BaseModel | None:
        """The body; None if the request has none. Raises ApiError, and RequestValidationError for JSON that
        is not of this kind."""
        data = await _received(request)
        if not data:
            return None
        share: BodyShare | None = request.scope.get("state", {}).get("body_share")
        num_bytes = len(data)

        run = self._run if num_bytes > _SMALL_BYTES else _run_here
        cost = await run(lambda: self._cost(data))
        if share is not None:
            share.take(cost)
        is_lenient = self._is_lenient or request.scope["path"].startswith(self._always_lenient)
        body, unknown = await run(lambda: self._made(data, kind, is_lenient))
        if share is not None:
            share.give(num_bytes)
        note_ignored(unknown)
        return body

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _cost(self, data: bytearray) -> int:
        try:
            return cost_of(data, self._most_bytes)
        except JsonTooCostly as error:
            status, code = (400, "invalid_value") if error.is_too_deep else (413, "request_too_large")
            advice = (
                ""
                if error.is_too_deep
                else "; send less at a time, or start with a larger --max-request-size"
            )
            message = f"{error.field or 'The body'}: {error}{advice}."
            raise ApiError(status, message, code=code, param=error.field) from None

    def _made(self, data: bytearray, kind: type[BaseModel], is_lenient: bool) -> tuple[BaseModel, list[str]]:
        value = read_body(data)
        data.clear()  # the bytes are needed no more, and are as large as the values
        try:
            return _validator(kind).validate(value, is_lenient, self._is_lenient)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_input=False)
            located = [each | {"loc": ("body", *each["loc"])} for each in errors]
            raise RequestValidationError(located, body=value) from None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


async def _run_here(work: Callable[[], T]) -> T:
    return work()


async def _received(request: Request) -> bytearray:
    """The whole body, which is never there twice."""
    data = bytearray()
    more = True
    try:
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            data += message.get("body", b"")
            more = message.get("more_body", False)
    except BaseException:
        data.clear()  # the error keeps this frame until it is answered, which may take many seconds
        raise
    return data


class BodyRoute(APIRoute):
    """Bodies are read by the application's BodyReader, `app.state.bodies`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()
        if self.body_field is None:
            return answer
        kind = self.body_field.field_info.annotation
        assert isinstance(kind, type) and issubclass(kind, BaseModel)

        async def answer_read(request: Request) -> Response:
            # Before anything else: FastAPI itself would read a body of another type, without limits.
            require_json(request.headers.get("content-type", ""))
            body = await request.app.state.bodies.read(request, kind)
            return await answer(_ReadRequest(request, body))

        return answer_read


class _ReadRequest(Request):
    """A request whose body FastAPI need not read any more. What is validated already, FastAPI takes as it
    is."""

    def __init__(self, request: Request, value: BaseModel | None) -> None:
        super().__init__(request.scope, request.receive)
        self._value = value

    async def body(self) -> bytes:
        return b"" if self._value is None else b"{}"

    async def json(self) -> Any:
        return self._value
