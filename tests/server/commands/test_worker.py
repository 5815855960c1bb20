"""`penstock worker` ends when it is told to, although its step hangs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock_server.commands import worker as command
from penstock_server.settings.settings import Settings


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(command.logs, "configure", lambda *_: None)
    monkeypatch.setattr(command.logging, "shutdown", lambda: None)
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


class Worker:
    """run() gets some signals, and ends when stop() was called; or when the process ends, if it hangs."""

    def __init__(self, num_signals: int, hangs: bool) -> None:
        self.num_signals, self.hangs, self.may_end = num_signals, hangs, threading.Event()

    def run(self) -> None:
        for _ in range(self.num_signals):
            signal.raise_signal(signal.SIGTERM)
        self.may_end.wait()

    def stop(self) -> None:
        if not self.hangs:
            self.may_end.set()


@pytest.mark.parametrize(
    ("num_signals", "hangs", "limit_s", "code"),
    [(1, False, 1e6, None), (1, True, 0.0, 1), (2, True, 1e6, 128 + signal.SIGTERM)],
)
def test_a_signal_ends_it(
    num_signals: int, hangs: bool, limit_s: float, code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, codes = Worker(num_signals, hangs), list[int]()

    def leave(given: int) -> None:
        codes.append(given)
        worker.may_end.set()

    fake: Any = lambda settings: worker  # noqa: E731
    monkeypatch.setattr(command, "worker_of", fake)
    monkeypatch.setattr(command, "STOP_S", limit_s)
    monkeypatch.setattr(command.os, "_exit", leave)
    assert command.run_worker(Settings(model="tiny", rank=1, leader="tcp://leader:1")) == 0
    assert codes == ([] if code is None else [code])
