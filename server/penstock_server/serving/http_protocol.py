"""uvicorn's HTTP connections, with a time limit for the head of a request."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

# uvicorn has two protocols and takes one by what is installed; both have the same methods.
_Protocol: Any = AutoHTTPProtocol


def http_protocol(head_timeout_s: float) -> type[asyncio.Protocol]:
    """A protocol that closes a connection if no complete head of a request has come `head_timeout_s` after
    the connection began or after the last answer; 0 is no limit. (uvicorn itself closes only connections that
    are silent after an answer.)"""

    class HTTPProtocol(_Protocol):  # type: ignore[misc]
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._expect_request()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._expect_request()

        def connection_lost(self, error: Exception | None) -> None:
            super().connection_lost(error)
            self._forget_timer()

        def _expect_request(self) -> None:
            self._forget_timer()
            if head_timeout_s and not self.transport.is_closing():
                self._timer = self.loop.call_later(head_timeout_s, self._end_if_idle)

        def _forget_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()

        def _end_if_idle(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return HTTPProtocol
