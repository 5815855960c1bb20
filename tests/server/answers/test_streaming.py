"""Events on the wire, and what happens when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from penstock_server.answers.streaming import DONE, KEEP_ALIVE, EventStream, events, unless_disconnected
from penstock_server.protocol.errors import ApiError

pytestmark = pytest.mark.anyio


class Chunk(BaseModel):
    text: str
    usage: int | None = None


async def chunks(*items: Chunk | Exception | None) -> AsyncGenerator[BaseModel | None, None]:
    for item in items:
        if isinstance(item, Exception):
            raise item
        yield item


async def sent(*items: Chunk | Exception | None) -> list[bytes]:
    return [event async for event in events(chunks(*items))]


async def test_events_hold_what_was_set_and_end_with_done() -> None:
    assert await sent(Chunk(text="a"), Chunk(text="é", usage=None)) == [
        b'data: {"text":"a"}\n\n',
        'data: {"text":"é","usage":null}\n\n'.encode(),
        DONE,
    ]


async def test_silence_is_a_comment() -> None:
    assert await sent(None, Chunk(text="a")) == [KEEP_ALIVE, b'data: {"text":"a"}\n\n', DONE]
    assert KEEP_ALIVE.startswith(b":") and KEEP_ALIVE.endswith(b"\n\n")


async def test_an_error_is_an_event_before_done() -> None:
    first, error, done = await sent(Chunk(text="a"), ApiError(503, "gone", code="engine_dead"))
    assert first == b'data: {"text":"a"}\n\n' and done == DONE
    body = json.loads(error.removeprefix(b"data: "))
    assert body["error"]["code"] == "engine_dead"


async def test_a_bug_is_not_told_to_the_client(caplog: pytest.LogCaptureFixture) -> None:
    error, done = await sent(ValueError("secret"))
    assert b"internal_error" in error and b"secret" not in error and done == DONE
    assert "secret" in caplog.text


class Connection:
    """The server's end of a request: what it sent, and a client that can leave."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.messages: list[Any] = []
        self.has_sent = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        if message.get("body"):
            self.has_sent.set()


async def test_work_ends_before_the_client_leaves() -> None:
    async def work() -> int:
        return 7

    assert await unless_disconnected(Connection().receive, work()) == 7


async def test_work_is_cancelled_when_the_client_leaves() -> None:
    connection = Connection()
    is_cancelled = False

    async def work() -> None:
        nonlocal is_cancelled
        connection.left.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled = True

    with pytest.raises(ClientDisconnect):
        await unless_disconnected(connection.receive, work())
    assert is_cancelled


async def test_errors_of_the_work_are_passed_on() -> None:
    async def work() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await unless_disconnected(Connection().receive, work())


class Source:
    """An endless answer that notes how it ended."""

    def __init__(self, *items: bytes) -> None:
        self.items = items
        self.is_ended = False
        self.num_closed = 0

    async def __call__(self) -> AsyncGenerator[bytes, None]:
        try:
            for item in self.items:
                yield item
            await asyncio.Event().wait()
        finally:
            self.is_ended = True

    def close(self) -> None:
        self.num_closed += 1


async def test_a_stream_has_headers_that_keep_it_moving() -> None:
    connection = Connection()

    async def source() -> AsyncGenerator[bytes, None]:
        yield b"one"

    source_of = Source()
    await EventStream(source(), source_of.close)({}, connection.receive, connection.send)
    start, *bodies = connection.messages
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert [body["body"] for body in bodies] == [b"one", b""]
    assert source_of.num_closed == 1


async def test_a_client_that_leaves_ends_the_source() -> None:
    connection, source = Connection(), Source(b"one")
    response = EventStream(source(), source.close)
    task = asyncio.create_task(response({}, connection.receive, connection.send))
    await connection.has_sent.wait()
    connection.left.set()
    with pytest.raises(ClientDisconnect):
        await task
    assert source.is_ended and source.num_closed == 1


async def test_a_source_that_was_never_asked_is_closed_too() -> None:
    """The client left before the first byte: the generator never ran, so it can't clean up."""
    connection, source = Connection(), Source(b"one")
    connection.left.set()

    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    with pytest.raises(ClientDisconnect):
        await EventStream(source(), source.close)({}, connection.receive, send)
    assert not source.is_ended and source.num_closed == 1
