"""Connections where descriptors are few."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from typing import Any

import pytest

from penstock_server.serving import accepting
from penstock_server.serving.listener import bind

pytestmark = pytest.mark.anyio


class Greeter(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        transport.write(b"hello")
        transport.close()


async def greeting(address: Any) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    try:
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
async def test_without_descriptors_connections_wait_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    loop = asyncio.get_running_loop()
    take, is_full = loop.sock_accept, True
    tries = []

    async def full(listener: Any) -> Any:
        tries.append(listener)
        if is_full:
            raise OSError(number, "no descriptor")
        return await take(listener)

    monkeypatch.setattr(loop, "sock_accept", full)
    monkeypatch.setattr(accepting, "_has_free", lambda listener, most: not is_full)
    monkeypatch.setattr(accepting, "_PAUSE_S", 0.001)
    caplog.set_level(logging.INFO)
    with bind("127.0.0.1", 0) as listener:
        task = asyncio.create_task(accepting.accept(listener, Greeter))
        waiting = asyncio.create_task(greeting(listener.getsockname()))
        await asyncio.sleep(0.05)
        assert len(tries) == 1 and not waiting.done()
        is_full = False
        assert await waiting == b"hello"
        task.cancel()
    lines = [record for record in caplog.records if record.name == accepting.__name__]
    assert [record.levelname for record in lines] == ["WARNING", "INFO"] and not lines[0].exc_info
    assert "ulimit -n" in lines[0].getMessage()


async def test_the_last_descriptors_are_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new descriptor is the lowest that is free: a high one says that few are left."""
    monkeypatch.setattr(accepting, "_PAUSE_S", 0.001)
    with bind("127.0.0.1", 0) as listener:
        lowest = os.dup(listener.fileno())
        os.close(lowest)
        assert accepting._has_free(listener, lowest + 1) and not accepting._has_free(listener, lowest)
        task = asyncio.create_task(accepting.accept(listener, Greeter, most=lowest + 3))
        for _ in range(8):  # each is closed, so that the next one finds a descriptor
            assert await greeting(listener.getsockname()) == b"hello"
        task.cancel()


async def test_another_error_leaves_the_event_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepting that fails at once, without waiting, would let nothing else run."""
    loop = asyncio.get_running_loop()
    tries = []

    async def fail(listener: Any) -> Any:
        tries.append(listener)
        if len(tries) > 3:
            raise asyncio.CancelledError
        raise OSError(errno.EPERM, "a firewall's rule")

    pauses = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(loop, "sock_accept", fail)
    monkeypatch.setattr(accepting.asyncio, "sleep", pause)  # type: ignore[attr-defined]
    with bind("127.0.0.1", 0) as listener, pytest.raises(asyncio.CancelledError):
        await accepting.accept(listener, Greeter)
    assert pauses == [accepting._PAUSE_S] * 3
