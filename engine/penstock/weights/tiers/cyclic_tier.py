"""A memory and the dense units in it, brought there ahead of time from the tier below.

Resident units have a buffer of their own and are read once. Streamed units share a ring of staging slots: a
slot is filled while other units are in use, lent to one unit, and filled again. policies.next_in_cycle()
decides what is read next. So reading goes on from the last layer to the first layer of the next sweep, the
first units are in use while other resident units still arrive, and with one slot nothing overlaps (the plain
twin)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from torch import Tensor

from penstock.memory.pools import MemoryPool
from penstock.spec import UnitKey
from penstock.weights.tiers.arrivals import Arrivals
from penstock.weights.tiers.policies import met_last, next_in_cycle
from penstock.weights.tiers.tier import Arrival, UnitReader


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
        num_once: int = 0,
    ) -> None:
        """Begins to read. `sizes` are the units' bytes in whole pages, in the order of a sweep; `pool` has
        room for pool_bytes(); `passing` units are needed just once. Only some steps sweep the first
        `num_once` units: they are never read ahead of the next step."""
        streamed = [size for key, size in sizes.items() if key not in resident]
        num_slots = min(num_slots, len(streamed))
        if streamed and num_slots < 1:
            raise ValueError("streamed units need a staging slot")
        self.resident = resident
        self.num_slots = num_slots
        self._cycle = tuple(sizes)
        self._num_once = num_once
        self._index = {key: index for index, key in enumerate(self._cycle)}
        slot_bytes = max(streamed, default=0)
        slots = [pool.allocate(f"staging.{i}", slot_bytes) for i in range(num_slots)]
        self._buffers = {key: pool.allocate(_name(key), sizes[key]) for key in self._cycle if key in resident}
        #: Bytes of units that are read again in each sweep.
        self.streamed_bytes = 0
        #: Seconds for which acquire() waited.
        self.stall_s = 0.0
        #: Resident units that are there. Nothing takes them away again, so that reading this needs no lock.
        self._settled: dict[UnitKey, Arrival] = {}
        #: Where the sweep stands. Who acquires a settled unit moves it without the lock.
        self._position = 0
        self._passing = passing
        self._passed: set[UnitKey] = set()
        self.arrivals = Arrivals(reader, slots, self._ask)
        with self.arrivals:
            self._ask()

    @staticmethod
    def pool_bytes(sizes: Mapping[UnitKey, int], resident: frozenset[UnitKey], num_slots: int) -> int:
        """Bytes that a tier takes from its pool."""
        streamed = [size for key, size in sizes.items() if key not in resident]
        staging = min(num_slots, len(streamed)) * max(streamed, default=0)
        return sum(sizes[key] for key in resident) + staging

    def acquire(self, key: UnitKey) -> Arrival:
        """Wait for a unit; the unit stays until it is released. Raises what reading raised; the next
        acquire() reads anew. A read that failed before anybody waited for it is tried once more now."""
        settled = self._settled.get(key)
        if settled is not None:  # waits for nobody, and makes no room that could be read into
            self._position = self._index[key]
            return settled
        with self.arrivals:
            self._position = self._index[key]
            self._passed.discard(key)
            self._make_room(key)
            self._ask()
            arrival = self.arrivals.units.get(key)
            if arrival is None:
                raise RuntimeError("the engine was closed while its layers were in use")
            arrival.is_lent = True
        return self._wait(key, arrival)

    def settled(self, key: UnitKey) -> Tensor | None:
        """The buffer of a unit that stays and has been acquired before, in this sweep or another. It need not
        be released."""
        arrival = self._settled.get(key)
        return None if arrival is None else arrival.buffer

    def release(self, key: UnitKey) -> None:
        """Give a unit back; a resident unit stays."""
        index = self._index[key] + 1
        position = index if index < len(self._cycle) else self._num_once % index
        if key in self._settled:
            self._position = position
            return
        with self.arrivals:
            arrival = self.arrivals.units.get(key)
            if arrival is None:  # closed in the meantime
                return
            arrival.is_lent = False
            if key in self._passing:
                self._passed.add(key)
            self._position = position
            if arrival.slot is not None:
                self.arrivals.forget(key, arrival)
            self._ask()

    def wait_until_loaded(self, report_progress: Callable[[], None]) -> None:
        """Until all resident units are there, while nobody acquires. `report_progress()` is called after each
        and may raise to give up. Raises what reading raised."""
        for key in self._cycle:
            if key not in self.resident:
                continue
            with self.arrivals:
                while key not in self.arrivals.units:
                    if self.arrivals.is_closed:
                        raise RuntimeError("the engine was closed while its layers were loading")
                    self.arrivals.wait()
                arrival = self.arrivals.units[key]
            self._result(key, arrival)
            report_progress()

    def close(self) -> None:
        """Read nothing more, and wait for what is being read into our buffers."""
        self.arrivals.close()
        self._settled.clear()

    def _wait(self, key: UnitKey, arrival: Arrival) -> Arrival:
        started = time.perf_counter()
        num_bytes = self._result(key, arrival)
        self.stall_s += time.perf_counter() - started
        if arrival.slot is None:
            self._settled[key] = arrival
        else:
            self.streamed_bytes += num_bytes
        return arrival

    def _result(self, key: UnitKey, arrival: Arrival) -> int:
        """Bytes that were read for a unit. Raises what reading raised."""
        try:
            return arrival.read.result()
        except BaseException:
            with self.arrivals:
                arrival.is_lent = False
                # Perhaps only the waiting was interrupted: a slot is not free while somebody writes there.
                if arrival.read.done():
                    self.arrivals.forget(key, arrival)
            raise

    # ------------------------------------------------------------ with the lock of the arrivals held

    def _make_room(self, key: UnitKey) -> None:
        """A place for the unit that the sweep stands at: the place of its own read that failed, or, if all
        slots hold units of a sweep that ended early, the slot of the unit that is needed last."""
        arrival = self.arrivals.units.get(key)
        if arrival is not None and arrival.has_failed:
            self.arrivals.forget(key, arrival)
        if key in self.arrivals.units or key in self.resident or self.arrivals.free_slots:
            return
        staged = _staged(self.arrivals)
        assert staged, "all slots are lent"
        last = met_last(staged, self._index, self._position, self._num_once)
        given_up = staged[last]
        while not given_up.read.done():  # the slot is free only when nobody writes into it any more
            self.arrivals.wait()
        self.arrivals.forget(last, given_up)

    def _ask(self) -> None:
        """Read units as long as there is a unit to read and a place for it."""
        while (
            key := self._next(bool(self.arrivals.free_slots)) or self._next_in_place_of_a_later_one()
        ) is not None:
            self.arrivals.begin(key, self._buffers.get(key))

    def _next(self, has_slot: bool) -> UnitKey | None:
        arrivals = self.arrivals
        num_staged = self.num_slots - len(arrivals.free_slots)
        lacks_residents = len(arrivals.units) - num_staged < len(self.resident)
        if arrivals.is_closed or not (has_slot or lacks_residents):
            return None
        return next_in_cycle(
            self._cycle,
            self._position,
            arrivals.units.keys() | self._passed if self._passed else arrivals.units,
            self.resident,
            has_slot,
            arrivals.can_read,
            self._num_once,
        )

    def _next_in_place_of_a_later_one(self) -> UnitKey | None:
        """Where a sweep does not begin where the last one would have gone on (an encoder's sweep, or a sweep
        after one that ended early), slots hold units that the sweep meets late: the last of them makes
        room."""
        staged = _staged(self.arrivals)
        wanted = self._next(has_slot=True) if staged else None
        if wanted is None:
            return None
        last = met_last((*staged, wanted), self._index, self._position, self._num_once)
        if last == wanted or not staged[last].read.done():
            return None
        self.arrivals.forget(last, staged[last])
        return wanted


def _staged(arrivals: Arrivals) -> dict[UnitKey, Arrival]:
    """Units in slots that nobody uses."""
    units = arrivals.units.items()
    return {key: each for key, each in units if each.slot is not None and not each.is_lent}


def _name(key: UnitKey) -> str:
    return ".".join(str(part) for part in key if part is not None)
