"""Memory of large requests goes back, once for many of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock_server.middleware import freed_memory
from penstock_server.middleware.freed_memory import LARGE, ReturnMemory, trim

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("received", "sent", "expected"),
    [(LARGE // 2, LARGE // 4, 0), (LARGE + 1, 0, 1), (0, LARGE + 1, 1)],
)
async def test_it_is_looked_for_once_after_large_requests(
    monkeypatch: pytest.MonkeyPatch, received: int, sent: int, expected: int
) -> None:
    monkeypatch.setattr(freed_memory, "DELAY_S", 0)
    num_trims = 0
    trimmed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def count() -> None:
        nonlocal num_trims
        num_trims += 1
        loop.call_soon_threadsafe(trimmed.set)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        await send({"type": "http.response.body", "body": b"x" * sent})

    middleware = ReturnMemory(app, count)

    async def ask(num_bytes: int) -> None:
        half = b"x" * (num_bytes // 2)
        messages = [{"body": half, "more_body": True}, {"body": b"x" + half, "more_body": False}]

        async def receive() -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            pass

        await middleware({"type": "http"}, receive, send)

    await asyncio.gather(*(ask(received) for _ in range(3)))
    if expected:
        await trimmed.wait()
    await asyncio.sleep(0)
    assert num_trims == expected


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


async def test_freed_memory_goes_back() -> None:
    """Blocks too small for mmap, with one that stays behind each MB of them: the heap can't just shrink."""
    blocks = [bytes(32_000) for _ in range(6400)]
    kept = blocks[::32]
    large = resident_bytes()
    del blocks
    trim()
    assert resident_bytes() < large - 100 * 2**20
    assert len(kept) == 200
