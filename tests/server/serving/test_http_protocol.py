"""Connections on which no request comes, or half of one. Time passes when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from penstock_server.serving import http_protocol as http_protocol_module
from penstock_server.serving.http_protocol import (
    CHUNK_BYTES,
    MAX_HEAD_BYTES,
    MAX_SMALL_CHUNKS,
    http_protocol,
)
from penstock_server.serving.listener import bind

pytestmark = pytest.mark.anyio

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
TIMEOUT_S = 1000.0
KEEP_ALIVE_S = 10**6


#: uvicorn's own, by the package that reads HTTP. httptools is faster and need not be installed.
PROTOCOLS = ("h11", "httptools")


def use(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip(f"uvicorn.protocols.http.{kind}_impl", exc_type=ImportError)
    name = {"h11": "H11Protocol", "httptools": "HttpToolsProtocol"}[kind]
    monkeypatch.setattr(http_protocol_module, "_Protocol", getattr(module, name))


class App:
    def __init__(self) -> None:
        self.has_begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.has_begun.set()
        await self.go_on.wait()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def server(app: App | Reader, head_timeout_s: float = TIMEOUT_S) -> AsyncGenerator[Any, None]:
    """Opens connections."""
    protocol = http_protocol(head_timeout_s)
    config = uvicorn.Config(
        app, log_config=None, lifespan="off", http=protocol, timeout_keep_alive=KEEP_ALIVE_S
    )
    config.load()
    running = uvicorn.Server(config)
    with bind("127.0.0.1", 0) as listener:
        task = asyncio.create_task(running.serve([listener]))

        async def connect() -> Any:
            """Returns when the server has seen it, so that its time has begun."""
            connections = running.server_state.connections
            num_before = len(connections)
            streams = await asyncio.open_connection(*listener.getsockname())
            while len(connections) == num_before:
                await asyncio.sleep(0)
            return streams

        yield connect
        running.should_exit = True
        await task


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets twice the timeout pass on the event loop's clock."""
    offset = 0.0

    def move() -> None:
        nonlocal offset
        loop = asyncio.get_running_loop()
        offset += 2 * TIMEOUT_S
        monkeypatch.setattr(loop, "time", lambda: type(loop).time(loop) + offset)

    return move


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    return await reader.readexactly(2)


@pytest.mark.parametrize("start", [b"", b"GET", HEAD])
async def test_half_a_request_ends_the_connection(start: bytes, pass_time: Callable[[], None]) -> None:
    async with server(App()) as connect:
        reader, writer = await connect()
        writer.write(start)
        pass_time()
        assert await reader.read() == b""
        writer.close()


async def test_so_does_half_a_request_behind_an_answer(pass_time: Callable[[], None]) -> None:
    app = App()
    app.go_on.set()
    async with server(app) as connect:
        reader, writer = await connect()
        writer.write(HEAD + b"\r\n" + HEAD)
        assert await read_answer(reader) == b"ok"
        pass_time()
        assert await reader.read() == b""
        writer.close()


async def test_an_answer_may_take_longer(pass_time: Callable[[], None]) -> None:
    """Also the second of two requests that came at once: none of its time is the first one's."""
    app = App()
    async with server(app) as connect:
        reader, writer = await connect()
        writer.write((HEAD + b"\r\n") * 2)
        await app.has_begun.wait()
        idle, idle_writer = await connect()
        pass_time()
        assert await idle.read() == b""  # so the time of both is over
        app.go_on.set()
        assert await read_answer(reader) == await read_answer(reader) == b"ok"
        for each in (writer, idle_writer):
            each.close()


async def test_zero_is_no_limit(pass_time: Callable[[], None]) -> None:
    app = App()
    app.go_on.set()
    async with server(app, head_timeout_s=0) as connect:
        reader, writer = await connect()
        writer.write(HEAD)
        pass_time()
        await asyncio.sleep(0)
        writer.write(b"\r\n")
        assert await read_answer(reader) == b"ok"
        writer.close()


@pytest.mark.parametrize("length", [b"Content-Length: 400000", b"Transfer-Encoding: chunked"])
async def test_the_rest_of_an_answered_requests_body_is_no_head(length: bytes) -> None:
    """A 401 or 503 comes before the body is read. The connection goes on with the next request, whose head
    begins in the body's last part."""
    app = App()
    app.go_on.set()
    part = b"x" * 20_000
    if length.startswith(b"Transfer"):
        part = b"4e20\r\n" + part + b"\r\n"
    end = b"0\r\n\r\n" if length.startswith(b"Transfer") else b""
    async with server(app) as connect:
        reader, writer = await connect()
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\n" + length + b"\r\n\r\n" + part)
        assert await read_answer(reader) == b"ok"
        for _ in range(14):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(part * 5 + end + HEAD)
        await writer.drain()
        writer.write(b"\r\n")
        assert await read_answer(reader) == b"ok"
        writer.close()


async def test_a_head_without_end_is_refused_behind_an_answer() -> None:
    app = App()
    app.go_on.set()
    async with server(app) as connect:
        reader, writer = await connect()
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab")
        assert await read_answer(reader) == b"ok"
        writer.write(HEAD + b"X-Long: " + b"x" * (2 * MAX_HEAD_BYTES))
        assert (await reader.readline()).startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
        writer.close()


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunks(number: int, size: int) -> bytes:
    return (b"%x\r\n" % size + b"x" * size + b"\r\n") * number


class Reader:
    """An application that reads the whole body."""

    def __init__(self) -> None:
        self.num_bytes = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        goes_on = True
        while goes_on:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            self.num_bytes += len(message["body"])
            goes_on = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize("kind", PROTOCOLS)
async def test_a_body_in_too_many_chunks_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(kind, monkeypatch)
    app = Reader()
    async with server(app) as connect:
        reader, writer = await connect()
        for body in (chunks(MAX_SMALL_CHUNKS, 1), chunks(MAX_SMALL_CHUNKS + 50, CHUNK_BYTES)):
            app.num_bytes = 0
            writer.write(CHUNKED + body + b"0\r\n\r\n")
            assert await read_answer(reader) == b"ok"
            assert app.num_bytes == body.count(b"x")
        writer.write(CHUNKED + chunks(MAX_SMALL_CHUNKS + 50, 1))
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400") and b"too many chunks" in answer
        writer.close()


@pytest.mark.parametrize("kind", PROTOCOLS)
async def test_what_is_no_chunk_behind_an_answer_ends_the_connection(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing more is written, and no error leaves the protocol."""
    use(kind, monkeypatch)
    app, errors = App(), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    app.go_on.set()
    async with server(app) as connect:
        reader, writer = await connect()
        writer.write(CHUNKED + chunks(3, 5))
        assert await read_answer(reader) == b"ok"
        writer.write(b"no chunk\r\n\r\n")
        assert await reader.read() == b""
        writer.close()
    assert not errors
