"""A machine in virtual time: a disk, a link and a device that take as long as bytes / rate says, and that see
every misuse of a buffer. Copies really happen, at once, so that a buffer given away too early shows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from penstock.errors import CorruptFile
from penstock.metrics import Traffic
from penstock.spec import UnitKey


class FakeMemory:
    """Host memory."""

    name = "fake"

    def __init__(self, prepare: Callable[[Tensor], None]) -> None:
        self.prepare = prepare

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)


class FakeMachine:
    """Rates in bytes per virtual second. The machine is its own lane and link and, by submit(), the reader of
    its disk."""

    torch_device = torch.device("cpu")

    def __init__(self, disk_rate: float = 1e6, link_rate: float = 1e6) -> None:
        self.disk_rate, self.link_rate = disk_rate, link_rate
        self.failing: set[int] = set()
        self.unpinned_bytes = 0
        self.pinned_bytes = 0
        self.stall_s = 0.0
        self.link_traffic = Traffic()
        #: Of the host, whose pieces are pinned, and of the device.
        self.memories = FakeMemory(self.pin), FakeMemory(lambda piece: None)
        #: When each of the three is done with everything it was asked for.
        self.disk_time = self.link_time = self.compute_time = 0.0
        #: By address: when its contents were complete; when its last use, or the copy out of it, has ended.
        self.written: dict[int, float] = {}
        self.used: dict[int, float] = {}
        self.lent: set[int] = set()
        self.leaving: set[int] = set()
        self.num_disk_reads = 0
        self.lock = threading.Lock()

    # The disk.

    def submit(self, key: UnitKey, buffer: Tensor) -> Future[int]:
        index = key.layer
        future: Future[int] = Future()
        address, num_bytes = buffer.data_ptr(), buffer.numel()
        with self.lock:
            assert address not in self.leaving, "overwritten while it is being copied"
            start = max(self.disk_time, self.used.get(address, 0.0))
            self.disk_time = self.written[address] = start + num_bytes / self.disk_rate
            self.num_disk_reads += 1
        if index in self.failing:
            future.set_exception(CorruptFile(f"layer {index}"))
        else:
            buffer.view(torch.float32)[:] = index
            future.set_result(num_bytes)
        return future

    # The device.

    @property
    def link(self) -> FakeMachine:
        return self

    @property
    def traffic(self) -> dict[str, Traffic]:
        return {"host to device": self.link_traffic}

    def pin(self, buffer: Tensor) -> None:
        self.pinned_bytes += buffer.numel()

    def copy(self, source: Tensor, target: Tensor, pieces: Sequence[tuple[int, int]] | None = None) -> None:
        with self.lock:
            from_, to = source.data_ptr(), target.data_ptr()
            assert to not in self.lent, "overwritten while it is in use"
            # What a real reader brought was complete at once.
            start = max(self.link_time, self.written.get(from_, 0.0), self.used.get(to, 0.0))
            self.link_time = start + source.numel() / self.link_rate
            self.written[to] = self.used[from_] = self.link_time
            self.leaving.add(from_)
            self.link_traffic.num_bytes += source.numel()
            self.link_traffic.busy_s += source.numel() / self.link_rate
            assert pieces is None, "whole units are modelled"
            target.copy_(source)

    def wait_copied(self, source: Tensor) -> None:
        with self.lock:
            self.leaving.discard(source.data_ptr())

    def acquire(self, target: Tensor, waited_s: float) -> None:
        with self.lock:
            self.lent.add(target.data_ptr())
            arrived = self.written[target.data_ptr()]
            self.stall_s += max(0.0, arrived - self.compute_time)
            self.compute_time = max(self.compute_time, arrived)

    def compute(self, seconds: float) -> None:
        with self.lock:
            self.compute_time += seconds

    def release(self, target: Tensor) -> None:
        with self.lock:
            self.lent.remove(target.data_ptr())
            self.used[target.data_ptr()] = self.compute_time

    def synchronize(self) -> None:
        """Nothing is ever late."""

    def close(self) -> None:
        assert not self.lent
