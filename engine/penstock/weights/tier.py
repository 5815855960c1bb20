"""A memory and the dense units in it, brought there ahead of time from the tier below.

Resident units have a buffer of their own and are read once. Streamed units share a ring of staging slots: a
slot is filled while other units are in use, lent to one unit, and filled again. policies.next_in_cycle()
decides what is read next. So reading goes on from the last layer to the first of the next sweep, use begins
while resident layers still arrive, and with one slot nothing overlaps (the plain twin)."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.memory.pools import MemoryPool
from penstock.metrics import Traffic
from penstock.spec import UnitKey
from penstock.weights.policies import last_in_cycle, next_in_cycle

#: Units that are being read at the same time: the link never waits for the next request, and what is needed
#: next is not stuck behind more than this.
MAX_READS = 2


class UnitReader(Protocol):
    """Brings units into a tier, on threads of its own."""

    def submit(self, key: UnitKey, buffer: Tensor) -> Future[int]:
        """Fill `buffer` (whole pages) with a unit; the result is the number of bytes read."""

    def close(self) -> None:
        """After all that was submitted is done."""


@dataclass
class Arrival:
    """A unit in memory, or on its way there."""

    buffer: Tensor
    read: Future[int]
    #: The staging slot; None for resident units.
    slot: int | None
    is_lent: bool = False

    @property
    def has_failed(self) -> bool:
        return self.read.done() and self.read.exception() is not None


class Tier(Protocol):
    """What the tier above takes units from."""

    @property
    def num_slots(self) -> int: ...

    def acquire(self, key: UnitKey) -> Arrival:
        """Wait for a unit; it stays until it is released. Raises what reading raised."""

    def release(self, key: UnitKey) -> None: ...

    def close(self) -> None: ...


class ReadClock:
    """Bytes and busy time of a link. Its owner's lock protects it."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.num_reads = 0
        self._busy_since = 0.0

    def begin(self) -> None:
        if self.num_reads == 0:
            self._busy_since = time.perf_counter()
        self.num_reads += 1

    def end(self, read: Future[int]) -> None:
        self.num_reads -= 1
        if self.num_reads == 0:
            self.traffic.busy_s += time.perf_counter() - self._busy_since
        if read.exception() is None:
            self.traffic.num_bytes += read.result()


class CyclicTier:
    """One user at a time: it acquires a unit, and releases it."""

    def __init__(
        self,
        sizes: Mapping[UnitKey, int],
        reader: UnitReader,
        pool: MemoryPool,
        resident: frozenset[UnitKey],
        num_slots: int,
        passing: frozenset[UnitKey] = frozenset(),
    ) -> None:
        """Begins to read. `sizes` are the units' bytes in whole pages, in the order of a sweep; `pool` has
        room for pool_bytes(); `passing` units are needed just once."""
        streamed = [size for key, size in sizes.items() if key not in resident]
        num_slots = min(num_slots, len(streamed))
        if streamed and num_slots < 1:
            raise ValueError("streamed units need a staging slot")
        self.resident = resident
        self.num_slots = num_slots
        self._cycle = tuple(sizes)
        self._index = {key: index for index, key in enumerate(self._cycle)}
        self._reader = reader
        self._passing = passing
        self._passed: set[UnitKey] = set()
        slot_bytes = max(streamed, default=0)
        self._slots = [pool.allocate(f"staging.{i}", slot_bytes) for i in range(num_slots)]
        self._buffers = {key: pool.allocate(_name(key), sizes[key]) for key in self._cycle if key in resident}
        #: Protects everything below; told when a read was asked for or has ended.
        self._changed = threading.Condition(threading.Lock())
        self._arrivals: dict[UnitKey, Arrival] = {}
        #: Resident units that are there: nothing takes them away again.
        self._settled: dict[UnitKey, Arrival] = {}
        self._free_slots = list(range(num_slots))
        self._position = 0
        self._clock = ReadClock()
        self._is_closed = False
        #: Bytes of units that are read again in each sweep.
        self.streamed_bytes = 0
        #: Seconds for which acquire() waited.
        self.stall_s = 0.0
        with self._changed:
            reads = self._ask()
        self._watch(reads)

    @staticmethod
    def pool_bytes(sizes: Mapping[UnitKey, int], resident: frozenset[UnitKey], num_slots: int) -> int:
        """What a tier takes."""
        streamed = [size for key, size in sizes.items() if key not in resident]
        staging = min(num_slots, len(streamed)) * max(streamed, default=0)
        return sum(sizes[key] for key in resident) + staging

    @property
    def traffic(self) -> Traffic:
        """What was read, from the tier below."""
        return self._clock.traffic

    def acquire(self, key: UnitKey) -> Arrival:
        """Wait for a unit; it stays until it is released. Raises what reading raised; the next acquire()
        reads anew. A read that failed before anybody waited for it is tried once more now."""
        settled = self._settled.get(key)
        if settled is not None:  # waits for nobody, and makes no room that could be read into
            self._position = self._index[key]
            return settled
        with self._changed:
            self._position = self._index[key]
            self._passed.discard(key)
            self._make_room(key)
            reads = self._ask()
            if key not in self._arrivals:
                raise RuntimeError("closed while layers were in use")
            arrival = self._arrivals[key]
            arrival.is_lent = True
        self._watch(reads)
        return self._wait(key, arrival)

    def release(self, key: UnitKey) -> None:
        """Give a unit back; a resident one stays."""
        position = (self._index[key] + 1) % len(self._cycle)
        if key in self._settled:
            self._position = position
            return
        with self._changed:
            arrival = self._arrivals.get(key)
            if arrival is None:  # closed in the meantime
                return
            arrival.is_lent = False
            if key in self._passing:
                self._passed.add(key)
            self._position = position
            if arrival.slot is not None:
                self._forget(key, arrival)
            reads = self._ask()
        self._watch(reads)

    def take_back(self) -> None:
        """Whatever was acquired and not released, by a user who is gone."""
        with self._changed:
            for arrival in self._arrivals.values():
                arrival.is_lent = False

    def wait_until_loaded(self, report_progress: Callable[[], None]) -> None:
        """Until all resident units are there, while nobody acquires. `report_progress()` is called after each
        and may raise to give up. Raises what reading raised."""
        for key in self._cycle:
            if key not in self.resident:
                continue
            with self._changed:
                while key not in self._arrivals:
                    if self._is_closed:
                        raise RuntimeError("closed while layers were loading")
                    self._changed.wait()
                arrival = self._arrivals[key]
            try:
                arrival.read.result()
            except BaseException:
                self._forget_failed(key, arrival)
                raise
            report_progress()

    def stop(self) -> None:
        """Ask for nothing more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ask for nothing more, and wait for what is being read into our buffers."""
        self.stop()
        with self._changed:
            reads = [arrival.read for arrival in self._arrivals.values()]
        for read in reads:
            read.exception()
        self._reader.close()
        with self._changed:  # reads know the tier, and the tier knows them: nothing else would part them soon
            self._arrivals.clear()
            self._settled.clear()

    def _wait(self, key: UnitKey, arrival: Arrival) -> Arrival:
        started = time.perf_counter()
        try:
            num_bytes = arrival.read.result()
        except BaseException:
            # Interrupted, perhaps: as long as somebody writes there, the place is not free.
            arrival.is_lent = False
            self._forget_failed(key, arrival)
            raise
        self.stall_s += time.perf_counter() - started
        if arrival.slot is None:
            self._settled[key] = arrival
        else:
            self.streamed_bytes += num_bytes
        return arrival

    def _forget_failed(self, key: UnitKey, arrival: Arrival) -> None:
        if arrival.read.done():
            with self._changed:
                self._forget(key, arrival)

    # ------------------------------------------------------------ with the lock held

    def _make_room(self, key: UnitKey) -> None:
        """A place for a unit that the sweep stands at: that of its own read that failed, or the slot of the
        unit that is needed last, if all slots hold units of a sweep that ended early."""
        arrival = self._arrivals.get(key)
        if arrival is not None and arrival.has_failed:
            self._forget(key, arrival)
        if key in self._arrivals or key in self.resident or self._free_slots:
            return
        staged = {
            other for other, each in self._arrivals.items() if each.slot is not None and not each.is_lent
        }
        last = last_in_cycle(self._cycle, self._position, staged)
        assert last is not None, "all slots are lent"
        given_up = self._arrivals[last]
        # The slot is free only when nobody writes into it any more.
        self._changed.wait_for(given_up.read.done)
        self._forget(last, given_up)

    def _forget(self, key: UnitKey, arrival: Arrival) -> None:
        """Unless somebody else did, who met the same error."""
        if self._arrivals.get(key) is not arrival:
            return
        del self._arrivals[key]
        if arrival.slot is not None:
            self._free_slots.append(arrival.slot)

    def _ask(self) -> list[Future[int]]:
        """Ask for units as long as there is one to ask for; what _watch() has to be told."""
        reads = []
        while (key := self._next_to_read()) is not None:
            slot = None if key in self.resident else self._free_slots.pop(0)
            buffer = self._buffers[key] if slot is None else self._slots[slot]
            read = self._submit(key, buffer)
            self._arrivals[key] = Arrival(buffer, read, slot)
            self._clock.begin()
            reads.append(read)
        if reads:
            self._changed.notify_all()
        return reads

    def _submit(self, key: UnitKey, buffer: Tensor) -> Future[int]:
        try:
            return self._reader.submit(key, buffer)
        except Exception as error:  # whoever waits for the unit learns of it
            self._is_closed = self._is_closed or sys.is_finalizing()
            failed: Future[int] = Future()
            failed.set_exception(error)
            return failed

    def _next_to_read(self) -> UnitKey | None:
        if self._is_closed or len(self._arrivals) == len(self.resident) + self.num_slots:
            return None  # every place is taken
        taken = self._arrivals.keys() | self._passed if self._passed else self._arrivals
        return next_in_cycle(
            self._cycle,
            self._position,  # may change meanwhile: who acquires a resident unit takes no lock
            taken,
            self.resident,
            bool(self._free_slots),
            self._clock.num_reads < MAX_READS,
        )

    # ------------------------------------------------------------ without it

    def _watch(self, reads: Sequence[Future[int]]) -> None:
        """To be told of their ends; a read that has ended already tells at once, on this thread."""
        for read in reads:
            read.add_done_callback(self._on_read)

    def _on_read(self, read: Future[int]) -> None:
        """On a reading thread."""
        with self._changed:
            self._clock.end(read)
            reads = self._ask()
            self._changed.notify_all()
        self._watch(reads)


def _name(key: UnitKey) -> str:
    return ".".join(str(part) for part in key if part is not None)
