"""Coroutines without an event loop: each await blocks until it is done, so that no coroutine is suspended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from penstock_client.exchange import Reply, Request

if TYPE_CHECKING:
    # Only type hints need these names: this file works with any transport.
    from penstock_client.transport import StreamReply, Transport

T = TypeVar("T")


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine whose awaits all block in place of giving way to an event loop. Any thread
    may call at_once(), also one in which an event loop runs."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise AssertionError("an await waits for an event loop, and there is none")


def blocking_sleep(sleep: Callable[[float], None]) -> Callable[[float], Awaitable[None]]:
    """`sleep` as a function to be awaited; it blocks."""

    async def pause(seconds: float) -> None:
        sleep(seconds)

    return pause


class BlockingSender:
    """A transport whose methods can be awaited, and block."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def send(self, request: Request) -> Reply:
        return self._transport.send(request)

    async def open(self, request: Request) -> BlockingReply:
        return BlockingReply(self._transport.open(request))


class BlockingReply:
    """The reply of a stream, whose methods can be awaited, and block."""

    def __init__(self, reply: StreamReply) -> None:
        self.request_id = reply.request_id
        self._reply = reply
        self._blocks = reply.blocks()

    async def next_block(self) -> bytes | None:
        return next(self._blocks, None)

    async def aclose(self) -> None:
        self._reply.close()
