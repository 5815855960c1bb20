"""ReturnMemory: what large requests took goes back to the system.

glibc keeps what a process frees: only the end of its heap shrinks, and one small object that lies behind
megabytes of freed text keeps them all. After a hundred bodies of some megabytes each the process stayed
750 MB larger than before, and fewer arenas (MALLOC_ARENA_MAX) changed nothing. malloc_trim() looks through
the whole heap and gives back each free page.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Bytes of a body, or of an answer, from which on it counts.
LARGE = 1 << 20
#: Seconds after a large request: by then its objects are gone, and a burst of them takes one look.
DELAY_S = 3.0


def trim() -> None:
    """Takes some 0.1 s per GB. Nothing happens where the C library is not glibc."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


class ReturnMemory:
    """Calls `trim` on a thread of its own, DELAY_S after a large request and no more often."""

    def __init__(self, app: ASGIApp, trim: Callable[[], None] = trim) -> None:
        self._app = app
        self._trim = trim
        self._is_due = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes = 0

        def count(message: Message) -> Message:
            nonlocal num_bytes
            num_bytes += len(message.get("body", b""))
            return message

        async def counted_receive() -> Message:
            return count(await receive())

        async def counted_send(message: Message) -> None:
            await send(count(message))

        try:
            await self._app(scope, counted_receive, counted_send)
        finally:
            if num_bytes > LARGE and not self._is_due:
                self._is_due = True
                asyncio.get_running_loop().call_later(DELAY_S, self._begin)

    def _begin(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, self._trim)
