"""LayerTier: a model's layers in one memory, brought there ahead of time from the tier below.

Resident layers have a buffer of their own and are read once. Streamed layers share a ring of staging slots:
a slot is filled while other layers are in use, lent to one layer, and filled again. One rule decides what is
read next: of all layers that are not there, the one that will be needed first and that has a place to go to.
So reading goes on from the last layer to the first of the next sweep, use begins while resident layers still
arrive, and with one slot nothing overlaps (the plain twin).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.memory.pools import MemoryPool
from penstock.metrics import Traffic

#: Layers that are being read at the same time: the link never waits for the next request, and what is needed
#: next is not stuck behind more than this.
MAX_READS = 2


class LayerReader(Protocol):
    """Brings layers into a tier, on threads of its own."""

    def submit(self, index: int, buffer: Tensor) -> Future[int]:
        """Fill `buffer` (whole pages) with layer `index`; the result is the number of bytes read."""

    def close(self) -> None:
        """After all that was submitted is done."""


@dataclass
class Arrival:
    """A layer in memory, or on its way there."""

    buffer: Tensor
    read: Future[int]
    #: The staging slot; None for resident layers.
    slot: int | None
    is_lent: bool = False


class LayerTier:
    """One user at a time: it acquires a layer, and releases it."""

    def __init__(
        self,
        sizes: list[int],
        reader: LayerReader,
        pool: MemoryPool,
        resident: frozenset[int],
        num_slots: int,
        passing: frozenset[int] = frozenset(),
    ) -> None:
        """Begins to read. `sizes` are the layers' bytes in whole pages; `pool` has room for pool_bytes();
        `passing` layers are needed just once."""
        streamed = [size for index, size in enumerate(sizes) if index not in resident]
        num_slots = min(num_slots, len(streamed))
        if streamed and num_slots < 1:
            raise ValueError("streamed layers need a staging slot")
        self.resident = resident
        self.num_slots = num_slots
        self._num_layers = len(sizes)
        self._reader = reader
        self._passing = passing
        self._passed: set[int] = set()
        slot_bytes = max(streamed, default=0)
        self._slots = [pool.allocate(f"staging.{i}", slot_bytes) for i in range(num_slots)]
        self._buffers = {i: pool.allocate(f"layer.{i}", sizes[i]) for i in sorted(resident)}
        self._lock = threading.Lock()
        self._has_read = threading.Condition(self._lock)
        self._arrivals: dict[int, Arrival] = {}
        #: Resident layers that are there: nothing takes them away again.
        self._settled: dict[int, Arrival] = {}
        self._free_slots = list(range(num_slots))
        self._position = 0
        self._num_reads = 0
        self._busy_since = 0.0
        self._is_closed = False
        #: What was read, from the tier below.
        self.traffic = Traffic()
        #: Of it, layers that are read again in each sweep.
        self.streamed_bytes = 0
        #: Seconds for which acquire() waited.
        self.stall_s = 0.0
        self._pump()

    @staticmethod
    def pool_bytes(sizes: list[int], resident: frozenset[int], num_slots: int) -> int:
        """What a tier takes."""
        streamed = [size for index, size in enumerate(sizes) if index not in resident]
        staging = min(num_slots, len(streamed)) * max(streamed, default=0)
        return sum(sizes[index] for index in resident) + staging

    def acquire(self, index: int) -> Arrival:
        """Wait for a layer; it stays until it is released. Raises what reading raised; the next acquire()
        reads anew. A read that failed before anybody waited for it is tried once more now."""
        settled = self._settled.get(index)
        if settled is not None:  # waits for nobody, and makes no room that could be read into
            self._position = index
            return settled
        with self._lock:
            self._position = index
            self._passed.discard(index)
            arrival = self._arrivals.get(index)
        if arrival is not None and arrival.read.done() and arrival.read.exception() is not None:
            self._forget(index, arrival)
        with self._lock:
            has_place = index in self._arrivals or index in self.resident or bool(self._free_slots)
        if not has_place:
            self._give_up_the_last()
        self._pump()
        with self._lock:
            if index not in self._arrivals:
                raise RuntimeError("closed while layers were in use")
            arrival = self._arrivals[index]
            arrival.is_lent = True
        started = time.perf_counter()
        try:
            num_bytes = arrival.read.result()
        except BaseException:
            # Interrupted, perhaps: as long as somebody writes there, the place is not free.
            arrival.is_lent = False
            if arrival.read.done():
                self._forget(index, arrival)
            raise
        self.stall_s += time.perf_counter() - started
        if arrival.slot is None:
            self._settled[index] = arrival
        else:
            self.streamed_bytes += num_bytes
        return arrival

    def release(self, index: int) -> None:
        """Give a layer back; a resident one stays."""
        if index in self._settled:
            self._position = (index + 1) % self._num_layers
            return
        with self._lock:
            arrival = self._arrivals.get(index)
            if arrival is None:  # closed in the meantime
                return
            arrival.is_lent = False
            if index in self._passing:
                self._passed.add(index)
            self._position = (index + 1) % self._num_layers
        if arrival.slot is not None:
            self._forget(index, arrival)
        self._pump()

    def take_back(self) -> None:
        """Whatever was acquired and not released, by a user who is gone."""
        with self._lock:
            for arrival in self._arrivals.values():
                arrival.is_lent = False

    def wait_until_loaded(self, report_progress: Callable[[], None]) -> None:
        """Until all resident layers are there, while nobody acquires. `report_progress()` is called after
        each and may raise to give up. Raises what reading raised."""
        for index in sorted(self.resident):
            with self._has_read:
                while index not in self._arrivals:
                    if self._is_closed:
                        raise RuntimeError("closed while layers were loading")
                    self._has_read.wait()
                arrival = self._arrivals[index]
            try:
                arrival.read.result()
            except BaseException:
                if arrival.read.done():
                    self._forget(index, arrival)
                raise
            report_progress()

    def close(self) -> None:
        """Ask for nothing more, and wait for what is being read into our buffers."""
        with self._lock:
            self._is_closed = True
            self._has_read.notify_all()
            reads = [arrival.read for arrival in self._arrivals.values()]
        for read in reads:
            read.exception()
        self._reader.close()
        with self._lock:  # reads know the tier, and the tier knows them: nothing else would part them soon
            self._arrivals.clear()
            self._settled.clear()

    def _give_up_the_last(self) -> None:
        """All slots hold layers of a sweep that ended early: drop the one that is needed last."""
        with self._lock:
            staged = [i for i, arrival in self._arrivals.items() if arrival.slot is not None]
            free = [i for i in staged if not self._arrivals[i].is_lent]
            last = max(free, key=lambda index: (index - self._position) % self._num_layers)
            arrival = self._arrivals[last]
        arrival.read.exception()  # its slot is free only when nobody writes into it any more
        self._forget(last, arrival)

    def _forget(self, index: int, arrival: Arrival) -> None:
        """Unless somebody else did, who met the same error."""
        with self._lock:
            if self._arrivals.get(index) is not arrival:
                return
            del self._arrivals[index]
            if arrival.slot is not None:
                self._free_slots.append(arrival.slot)

    def _pump(self) -> None:
        """Ask for layers as long as there is one to ask for."""
        while True:
            with self._lock:
                index = self._next_to_read()
                if index is None:
                    return
                slot = None if index in self.resident else self._free_slots.pop(0)
                buffer = self._buffers[index] if slot is None else self._slots[slot]
                read = self._submit(index, buffer)
                self._arrivals[index] = Arrival(buffer, read, slot)
                self._has_read.notify_all()
                if self._num_reads == 0:
                    self._busy_since = time.perf_counter()
                self._num_reads += 1
            read.add_done_callback(self._on_read)

    def _submit(self, index: int, buffer: Tensor) -> Future[int]:
        try:
            return self._reader.submit(index, buffer)
        except Exception as error:  # whoever waits for the layer learns of it
            self._is_closed = self._is_closed or sys.is_finalizing()
            failed: Future[int] = Future()
            failed.set_exception(error)
            return failed

    def _next_to_read(self) -> int | None:
        if len(self._arrivals) == len(self.resident) + self.num_slots:
            return None  # every place is taken
        position = self._position  # may change meanwhile: who acquires a resident layer takes no lock
        for ahead in range(0 if self._is_closed else self._num_layers):
            if ahead and self._num_reads >= MAX_READS:
                break  # what is waited for now is asked for in any case
            index = (position + ahead) % self._num_layers
            if index in self._arrivals or index in self._passed:
                continue
            if index in self.resident or self._free_slots:
                return index
        return None

    def _on_read(self, read: Future[int]) -> None:
        """On a reading thread."""
        with self._lock:
            self._num_reads -= 1
            if self._num_reads == 0:
                self.traffic.busy_s += time.perf_counter() - self._busy_since
            if read.exception() is None:
                self.traffic.num_bytes += read.result()
        self._pump()
