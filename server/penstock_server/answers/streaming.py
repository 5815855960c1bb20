"""Server-sent events, and the check whether a client has left. This file knows nothing of OpenAI's
formats."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock_server.protocol.errors import api_error

T = TypeVar("T")

#: A comment: clients skip comments, and proxies see that the connection is in use.
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

#: These headers forbid caches and proxies to hold events back. nginx reads X-Accel-Buffering.
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class NamedChunk(BaseModel):
    #: The event's name.
    type: str


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client leaves first, `work` is cancelled and ClientDisconnect raised.

    The request's body must have been read before.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    tasks = {working, leaving}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def events(chunks: AsyncGenerator[BaseModel | None, None]) -> AsyncGenerator[bytes, None]:
    """The events of a stream of chunks: a chunk is an event with the fields that are set, None a keep-alive
    comment. If the chunks end with an exception, an event describes the error. [DONE] always comes last."""
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield KEEP_ALIVE if chunk is None else _event(chunk)
    except Exception as error:
        yield b"data: " + json.dumps(api_error(error).body).encode() + b"\n\n"
    yield DONE


async def named_events(chunks: AsyncGenerator[NamedChunk | None, None]) -> AsyncGenerator[bytes, None]:
    """The events of a stream of named chunks, which describe errors and the end of the stream themselves."""
    async with aclosing(chunks):
        async for chunk in chunks:
            if chunk is None:
                yield KEEP_ALIVE
            else:
                yield f"event: {chunk.type}\n".encode() + _event(chunk)


def _event(chunk: BaseModel) -> bytes:
    return b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n"


class EventStream(Response):
    """An answer that sends events until they end or the client leaves. `close` is always called at the end,
    also if no event was ever sent."""

    media_type = "text/event-stream"

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        media_type: str = media_type,
    ) -> None:
        self.media_type = media_type
        self.status_code = 200
        self.background = None
        self._source = source
        self._close = close
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(send))
        finally:
            try:
                await self._source.aclose()
            finally:
                self._close()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for event in self._source:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
