"""The listening socket: told at once what is wrong with an address, and no delay on answers."""

from __future__ import annotations

import asyncio
import socket

import pytest

from penstock.errors import ConfigError
from penstock_server.serving.listener import bind


def test_a_port_in_use_is_told() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: .*in use.*--port"):
            bind("127.0.0.1", port)


@pytest.mark.anyio
async def test_answers_are_not_held_back_by_nagle() -> None:
    is_off: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        is_off.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = bind("127.0.0.1", 0)
    async with await asyncio.start_server(accepted, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await is_off
        writer.close()


def test_an_address_that_is_not_ours_is_told() -> None:
    with pytest.raises(ConfigError, match="192.0.2.1"):
        bind("192.0.2.1", 0)


@pytest.mark.anyio
@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such limit")
async def test_a_client_that_takes_nothing_is_cut() -> None:
    """It stays connected and never reads: its connection ends, though its answer was not taken."""
    is_lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    class Flood(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.WriteTransport)
            transport.write(bytes(50_000_000))  # more than both systems' buffers take

        def connection_lost(self, error: Exception | None) -> None:
            is_lost.set_result(error)

    listener = bind("127.0.0.1", 0, send_timeout_s=1)
    server = await asyncio.get_running_loop().create_server(Flood, sock=listener)
    async with server:
        with socket.create_connection(listener.getsockname()):
            assert isinstance(await is_lost, TimeoutError)


@pytest.mark.anyio
async def test_connections_are_asked_whether_they_are_alive() -> None:
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
