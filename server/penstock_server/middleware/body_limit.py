"""BodyLimit: refuses requests whose body is too large, comes too slowly, or stops in the middle."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock_server.protocol.errors import CLIENT_CLOSED_REQUEST, ApiError

#: Seconds for which the rest of a refused body is read and thrown away.
_LINGER_S = 10.0


class BodyLimit:
    """Answers 413 to a request whose body is larger than `max_bytes`, before the whole body is read, and 408
    to a request whose body has not come after `timeout_s` (0: no limit). Both answers end the connection."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s or None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _LimitedBody(receive, self._max_bytes, self._timeout_s)

        async def send_and_linger(message: Message) -> None:
            """Reads the rest of a refused body before the answer's last message, which closes the connection.
            A client that still sends at that moment would see a broken connection in place of the answer."""
            if body.is_too_large and message["type"] == "http.response.body" and not message.get("more_body"):
                await send({**message, "more_body": True})
                await body.discard()
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length) > self._max_bytes:
            await body.refusal().response()(scope, receive, send_and_linger)
        else:
            await self._app(scope, body, send_and_linger)


class _LimitedBody:
    """The `receive` of one request, with limits until the body is complete."""

    def __init__(self, receive: Receive, max_bytes: int, timeout_s: float | None) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        self._num_bytes = 0
        self._is_complete = False
        #: The body is larger than the limit, and the rest of it is not needed.
        self.is_too_large = False

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
            # The client does not get this answer. With this status, logs and counts don't show a bad request.
            raise ApiError(CLIENT_CLOSED_REQUEST, "The client left while it sent its request.")
        self._num_bytes += len(message.get("body", b""))
        self._is_complete = not message.get("more_body", False)
        if self._num_bytes > self._max_bytes:
            raise self.refusal()
        return message

    def refusal(self) -> ApiError:
        self.is_too_large = True
        message = f"The request is larger than {self._max_bytes} bytes."
        return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})

    async def discard(self) -> None:
        """Reads the rest of the body and keeps none of it, until the body ends or _LINGER_S seconds are
        over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while not self._is_complete:
                    message = await self._receive()
                    self._is_complete = not (message["type"] == "http.request" and message["more_body"])
