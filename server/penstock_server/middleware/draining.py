"""Drain: counts the requests that are being answered, and refuses new requests when the server is to end.

This file knows neither signals nor the engine. Requests of probes and scrapers are not counted, and are
answered to the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock_server.protocol.errors import ApiError
from penstock_server.protocol.paths import is_operational


class Drain:
    """The state of a server on one event loop: how many requests are open, and whether new ones are taken."""

    def __init__(self) -> None:
        self.num_open = 0
        #: The answer to new requests; None while new requests are taken.
        self.refusal: ApiError | None = None
        self._changed = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        return self.refusal is not None

    def begin(self, refusal: ApiError) -> None:
        """Refuses new requests from now on, with `refusal`. The refusal of the first call stays."""
        self.refusal = self.refusal or refusal

    def enter(self) -> None:
        self.num_open += 1

    def leave(self) -> None:
        self.num_open -= 1
        self._changed.set()

    async def wait_until_empty(self, timeout_s: float) -> bool:
        """Waits until no request is open. Returns False if some are after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.num_open:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True


class DrainMiddleware:
    """Counts requests, and refuses them while the server drains. While it drains, every answer closes its
    connection."""

    def __init__(self, app: ASGIApp, drain: Drain, count_rejected: Callable[[str], None]) -> None:
        """count_rejected: gets the code of each refusal."""
        self._app = app
        self._drain = drain
        self._count_rejected = count_rejected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start" and self._drain.is_draining:
                MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        if is_operational(scope["path"]):
            await self._app(scope, receive, send_and_close)
        elif self._drain.refusal is not None:
            self._count_rejected(str(self._drain.refusal.code))
            await self._drain.refusal.response()(scope, receive, send_and_close)
        else:
            self._drain.enter()
            try:
                await self._app(scope, receive, send_and_close)
            finally:
                self._drain.leave()
