"""BodyLimit: refuses requests whose body is too large, comes too slowly, stops in the middle, or finds no
room beside those of the other requests."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock_server.middleware.body_budget import BodyBudget
from penstock_server.protocol.errors import CLIENT_CLOSED_REQUEST, ApiError

#: Seconds for which the rest of a refused body is read and thrown away.
_LINGER_S = 10.0


class BodyLimit:
    """Answers 413 to a request whose body is larger than `max_bytes`, before the whole body is read, 408 to a
    request whose body has not come after `timeout_s` (0: no limit), and 503 to one for which `budget` has no
    room. These answers end the connection.

    The request's share of the budget, `body_share` of the scope's state, lasts until the request is
    answered."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float, budget: BodyBudget) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s or None
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _LimitedBody(receive, self._max_bytes, self._timeout_s, self._budget)

        async def send_and_linger(message: Message) -> None:
            """Reads the rest of a refused body before the answer's last message, which closes the connection.
            A client that still sends at that moment would see a broken connection in place of the answer."""
            if body.is_refused and message["type"] == "http.response.body" and not message.get("more_body"):
                await send({**message, "more_body": True})
                await body.discard()
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        length = Headers(scope=scope).get("content-length", "")
        scope.setdefault("state", {})["body_share"] = body.share
        try:
            if _is_more(length, self._max_bytes):
                await body.refusal().response()(scope, receive, send_and_linger)
            else:
                await self._app(scope, body, send_and_linger)
        finally:
            body.share.close()


def _is_more(length: str, max_bytes: int) -> bool:
    """Whether a Content-Length is more than the limit. Python refuses to read a number of 5,000 digits."""
    digits = length.lstrip("0")
    return digits.isdecimal() and (len(digits) > len(str(max_bytes)) or int(digits) > max_bytes)


class _LimitedBody:
    """The `receive` of one request, with limits until the body is complete."""

    def __init__(self, receive: Receive, max_bytes: int, timeout_s: float | None, budget: BodyBudget) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        self._budget = budget
        self.share = budget.share(self._give_way)
        self._num_bytes = 0
        self._waiting: asyncio.Timeout | None = None
        self._gives_way = False
        #: The rest of the body is not needed.
        self.is_refused = False

    async def __call__(self) -> Message:
        if self.share.is_complete:
            return await self._receive()
        message = await self._next()
        if message["type"] == "http.disconnect":
            # The client does not get this answer. With this status, logs and counts don't show a bad request.
            raise ApiError(CLIENT_CLOSED_REQUEST, "The client left while it sent its request.")
        part = message.get("body", b"")
        self._num_bytes += len(part)
        self.share.is_complete = not message.get("more_body", False)
        if self._num_bytes > self._max_bytes:
            raise self.refusal()
        if self._gives_way:  # this part came in the same moment
            raise self._closing(self._budget.refusal())
        try:
            self.share.take(len(part))
        except ApiError as error:
            raise self._closing(error) from None
        return message

    async def _next(self) -> Message:
        """The next message. Raises ApiError if it takes too long, or has to give way meanwhile."""
        try:
            async with asyncio.timeout_at(self._deadline) as self._waiting:
                if self._gives_way:
                    raise TimeoutError
                return await self._receive()
        except TimeoutError:
            if self._gives_way:
                raise self._closing(self._budget.refusal()) from None
            raise ApiError(
                408,
                f"The request's body did not arrive in {self._timeout_s:g} seconds.",
                code="request_timeout",
                headers={"Connection": "close"},
            ) from None
        finally:
            self._waiting = None

    def _give_way(self) -> None:
        self._gives_way = True
        if self._waiting is not None:
            self._waiting.reschedule(0)

    def refusal(self) -> ApiError:
        message = f"The request is larger than {self._max_bytes} bytes."
        return self._closing(ApiError(413, message, code="request_too_large"))

    def _closing(self, error: ApiError) -> ApiError:
        """The error, which ends the connection: the rest of the body is not needed."""
        self.is_refused = True
        error.headers = {**(error.headers or {}), "Connection": "close"}
        return error

    async def discard(self) -> None:
        """Reads the rest of the body and keeps none of it, until the body ends or _LINGER_S seconds are
        over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while not self.share.is_complete:
                    message = await self._receive()
                    goes_on = message["type"] == "http.request" and message["more_body"]
                    self.share.is_complete = not goes_on
