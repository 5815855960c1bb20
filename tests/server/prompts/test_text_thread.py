"""One text at a time, in order, and not without bound."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.errors import QueueFull
from penstock_server.prompts import text_thread
from penstock_server.prompts.text_thread import TextThread

pytestmark = pytest.mark.anyio


async def test_work_runs_elsewhere_and_its_errors_come_back() -> None:
    texts = TextThread()
    assert await texts.run(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await texts.run(lambda: 1 // 0)
    texts.close()


async def test_no_more_than_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_thread, "MAX_WAITING", 2)
    texts, gate = TextThread(), threading.Event()
    waiting = [asyncio.create_task(texts.run(gate.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await texts.run(str)
    gate.set()
    assert await asyncio.gather(*waiting) == [True, True]
    assert await texts.run(str) == ""
    texts.close()
