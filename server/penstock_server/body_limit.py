"""BodyLimit: requests that are too large, come too slowly, or stop in the middle."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock_server.errors import CLIENT_CLOSED_REQUEST, ApiError


class BodyLimit:
    """Answers 413 to a request whose body is larger than `max_bytes`, before it is read whole, and 408 to one
    whose body is not there after `timeout_s`; 0 is no limit. The connection ends with either."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s or None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length) > self._max_bytes:
            await _too_large(self._max_bytes).response()(scope, receive, send)
            return
        await self._app(scope, _LimitedBody(receive, self._max_bytes, self._timeout_s), send)


class _LimitedBody:
    """`receive` of one request. Once the body is there, it only tells when the client leaves."""

    def __init__(self, receive: Receive, max_bytes: int, timeout_s: float | None) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        self._num_bytes = 0
        self._is_complete = False

    async def __call__(self) -> Message:
        if self._is_complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"The request's body did not arrive in {self._timeout_s:g} seconds.",
                code="request_timeout",
                headers={"Connection": "close"},
            ) from None
        if message["type"] == "http.disconnect":
            # Nobody gets this answer, but the log and the counts should not show a mistake of the client's.
            raise ApiError(CLIENT_CLOSED_REQUEST, "The client left while it sent its request.")
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        self._is_complete = not message.get("more_body", False)
        return message


def _too_large(max_bytes: int) -> ApiError:
    message = f"The request is larger than {max_bytes} bytes."
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
