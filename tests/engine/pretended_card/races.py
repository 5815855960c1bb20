"""Races: torch's own race detector (CSAN), told of every access that could be a race.

Everything but copies runs on one stream, so only memory that a copy on another stream writes is watched: each
buffer by its address, and the storage that it lies in by that address and one, for the zeros it began with.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable

import torch
from torch.cuda._sanitizer import EventHandler


class Race(AssertionError):
    """Two accesses that nothing puts in order, one of them a write."""


class Races:
    """Any thread may call."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        #: Told when a function of the host has ended, and when more of a stream has run.
        self.changed = threading.Condition(self.lock)
        self.detector = EventHandler()
        #: In case whoever met one swallowed it.
        self.found: list[Race] = []
        #: Buffers that copies wrote: [first address, the one after the last], in order.
        self._buffers: list[list[int]] = []

    def on_allocation(self, storage: torch.UntypedStorage, stream: int) -> None:
        """Memory that was somebody else's is nobody's, and `stream` fills it."""
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        with self.lock:
            gone = [buffer for buffer in self._buffers if begin <= buffer[0] < end]
            self._buffers = [buffer for buffer in self._buffers if buffer not in gone]
            for key in (begin + 1, *(buffer[0] for buffer in gone)):
                self.detector.tensors_accessed.accesses.pop(key, None)
            self._access(stream, "the allocation", set(), {begin + 1})

    def on_copy(self, target: torch.Tensor, stream: int) -> None:
        begin, end = target.data_ptr(), target.data_ptr() + target.nbytes
        with self.lock:
            buffer = self._buffer_at(begin)
            if buffer is None:
                bisect.insort(self._buffers, [begin, end])
            else:
                buffer[1] = max(buffer[1], end)
            self._access(stream, "a copy", {target.untyped_storage().data_ptr() + 1}, {begin})

    def on_use(self, addresses: Iterable[int], stream: int, name: str) -> None:
        """A kernel or an operation on these addresses; buffers that copies write, it only reads."""
        with self.lock:
            buffers = {buffer[0] for at in addresses if (buffer := self._buffer_at(at)) is not None}
            if buffers:
                self._access(stream, name, buffers, set())

    def _buffer_at(self, address: int) -> list[int] | None:
        index = bisect.bisect_right(self._buffers, [address, 1 << 63]) - 1
        buffer = self._buffers[index] if index >= 0 else None
        return buffer if buffer is not None and address < buffer[1] else None

    def _access(self, stream: int, name: str, reads: set[int], writes: set[int]) -> None:
        aliases: dict[int, list[str]] = {address: [] for address in reads | writes}
        errors = self.detector._handle_kernel_launch(stream, reads, writes, set(), name, aliases)
        for error in errors:
            race = Race(f"{error.current_access.operator} does not wait for {error.previous_access.operator}")
            self.found.append(race)
            raise race
