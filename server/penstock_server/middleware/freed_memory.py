"""ReturnMemory: gives the memory of large requests back to the system.

glibc keeps memory that a process frees: the heap shrinks at its end only, and one small object after
megabytes of freed text keeps all of them. After a hundred bodies of some megabytes each, the process stayed
750 MB larger than before; fewer arenas (MALLOC_ARENA_MAX) changed nothing. malloc_trim() looks through the
whole heap and gives back each free page.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Bytes of body and answer together from which on a request is large.
LARGE = 1 << 20
#: Seconds between a large request and trim(): its objects are gone by then, and a burst of large requests
#: needs one trim().
DELAY_S = 3.0


def trim() -> None:
    """Gives free pages back, in some 0.1 s per GB. Does nothing if the C library is not glibc."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


class ReturnMemory:
    """Calls `trim` on another thread, DELAY_S after a large request, and at most once in DELAY_S."""

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
