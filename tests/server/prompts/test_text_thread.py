"""Clients take turns, short texts do not wait for long ones, and there is a bound."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import pytest

from penstock.errors import QueueFull
from penstock_server.prompts import text_thread
from penstock_server.prompts.text_thread import MAX_SHORT, TextThread
from penstock_server.telemetry.request_info import RequestInfo, current_request

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


def as_client(client: str, num_body_bytes: int = 0) -> RequestInfo:
    info = RequestInfo("id", client, num_body_bytes=num_body_bytes)
    current_request.set(info)
    return info


@pytest.mark.parametrize(("num_body_bytes", "num_chars"), [(MAX_SHORT + 1, 0), (10, MAX_SHORT + 1)])
async def test_a_short_request_does_not_wait_for_a_long_one(num_body_bytes: int, num_chars: int) -> None:
    texts, gate = TextThread(), threading.Event()
    as_client("one", num_body_bytes)
    long = asyncio.create_task(texts.run(gate.wait, num_chars))
    await asyncio.sleep(0)
    as_client("one", MAX_SHORT)
    assert await texts.run(str) == "" and not long.done()
    gate.set()
    assert await long
    texts.close()


async def test_clients_take_turns_and_nothing_is_read_for_one_who_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text_thread, "TURN_S", 1e6)
    texts, gate, read = TextThread(), threading.Event(), list[str]()
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(texts.run(gate.wait))]
    for name in ("a1", "a2", "a3", "b1", "c1", "b2"):
        as_client(name[0])
        tasks.append(asyncio.create_task(texts.run(partial(read.append, name))))
        await asyncio.sleep(0)
    tasks[2].cancel()
    gate.set()
    await asyncio.wait(tasks)
    assert read == ["a1", "b1", "c1", "a3", "b2"]
    assert await texts.run(str) == ""
    texts.close()


async def test_a_short_request_that_takes_long_holds_up_no_other() -> None:
    """A client's third work waits for its first two, and other clients' works don't."""
    texts, gates = TextThread(), [threading.Event() for _ in range(3)]
    as_client("hostile")
    hostile = [asyncio.create_task(texts.run(gate.wait)) for gate in gates]
    await asyncio.sleep(0)
    as_client("honest")
    assert await texts.run(str) == ""
    as_client("hostile")
    waiting = asyncio.create_task(texts.run(str))
    as_client("honest")
    assert await texts.run(str) == "" and not waiting.done()
    assert not any(task.done() for task in hostile)
    gates[0].set()
    assert await hostile[0]
    gates[2].set()
    assert await hostile[2] and await waiting == "" and not hostile[1].done()
    gates[1].set()
    assert await hostile[1]
    texts.close()


async def test_few_works_are_late() -> None:
    texts, gates = TextThread(), [threading.Event() for _ in range(text_thread.MAX_LATE + 1)]
    begun = list[int]()

    def work(number: int) -> bool:
        begun.append(number)
        return gates[number].wait()

    tasks = list[asyncio.Task[bool]]()
    for number in range(len(gates)):
        as_client(str(number))
        tasks.append(asyncio.create_task(texts.run(partial(work, number))))
    while len(begun) < len(gates):
        await asyncio.sleep(0.001)
    as_client("last")
    last = asyncio.create_task(texts.run(partial(begun.append, -1)))
    await asyncio.sleep(2 * text_thread.TURN_S)
    assert begun == [*range(len(gates))]
    gates[1].set()
    await last
    assert [task.done() for task in tasks] == [number == 1 for number in range(len(gates))]
    for gate in gates:
        gate.set()
    await asyncio.wait(tasks)
    texts.close()


async def test_a_work_that_fails_is_followed_by_the_next() -> None:
    texts = TextThread()
    results = await asyncio.gather(texts.run(lambda: 1 // 0), texts.run(lambda: 2), return_exceptions=True)
    assert isinstance(results[0], ZeroDivisionError) and results[1] == 2
    texts.close()
