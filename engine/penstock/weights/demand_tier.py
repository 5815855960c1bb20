"""A memory and the units in it that somebody asked for: experts of a mixture.

All units have slots of one size, allocated at the start. A unit stays until policies.victim() gives its slot
to another. Nothing is read ahead: which expert a token needs is known only in its layer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future

from penstock.memory.pools import MemoryPool
from penstock.metrics import Traffic
from penstock.spec import UnitKey
from penstock.weights.policies import victim
from penstock.weights.tier import MAX_READS, Arrival, ReadClock, UnitReader


class DemandTier:
    """One user at a time: it gathers (or acquires) units, and releases them."""

    def __init__(
        self,
        sizes: Mapping[UnitKey, int],
        reader: UnitReader,
        pool: MemoryPool,
        num_slots: int,
        num_per_sweep: int,
    ) -> None:
        """`sizes` are the units' bytes in whole pages; `pool` has room for pool_bytes(); a sweep of one token
        asks for `num_per_sweep` units."""
        if num_slots < 1:
            raise ValueError("units that are asked for need a slot")
        self.num_slots = min(num_slots, len(sizes))
        self._num_per_sweep = num_per_sweep
        self._reader = reader
        slot_bytes = max(sizes.values())
        self._slots = [pool.allocate(f"expert.{index}", slot_bytes) for index in range(self.num_slots)]
        #: Protects everything below; told when a read has ended or a unit was released.
        self._changed = threading.Condition(threading.Lock())
        self._arrivals: dict[UnitKey, Arrival] = {}
        self._free_slots = list(range(self.num_slots))
        #: Of each unit that is there: the number of its last use.
        self._last_uses: dict[UnitKey, int] = {}
        self._num_uses = 0
        self._clock = ReadClock()
        self._is_closed = False
        #: Units that were asked for, and found.
        self.num_asked = self.num_hits = 0
        #: Bytes of units that were read because somebody asked.
        self.streamed_bytes = 0
        #: Seconds for which gather() and acquire() waited.
        self.stall_s = 0.0

    @staticmethod
    def pool_bytes(sizes: Mapping[UnitKey, int], num_slots: int) -> int:
        """What a tier takes."""
        return min(num_slots, len(sizes)) * max(sizes.values(), default=0)

    @property
    def traffic(self) -> Traffic:
        """What was read, from the tier below."""
        return self._clock.traffic

    def gather(self, keys: Sequence[UnitKey]) -> Iterator[tuple[UnitKey, Arrival]]:
        """Each of these units once, those that are there first, and then in the order in which they arrive.
        A unit stays until the next one is asked for. Raises what reading raised."""
        waiting = dict.fromkeys(keys)
        with self._changed:
            self.num_asked += len(waiting)
            self.num_hits += sum(self._is_there(key) for key in waiting)
        while waiting:
            key = self._take(waiting)
            del waiting[key]
            try:
                yield key, self._arrivals[key]
            finally:
                self.release(key)

    def acquire(self, key: UnitKey) -> Arrival:
        """Wait for a unit; it stays until it is released. Raises what reading raised."""
        return self._arrivals[self._take({key: None})]

    def release(self, key: UnitKey) -> None:
        with self._changed:
            arrival = self._arrivals.get(key)
            if arrival is not None:  # it was not closed in the meantime
                arrival.is_lent = False
            self._changed.notify_all()

    def stop(self) -> None:
        """Ask for nothing more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ask for nothing more, and wait for what is being read into our slots."""
        self.stop()
        with self._changed:
            reads = [arrival.read for arrival in self._arrivals.values()]
        for read in reads:
            read.exception()
        self._reader.close()
        with self._changed:  # reads know the tier, and the tier knows them: nothing else would part them soon
            self._arrivals.clear()
            self._last_uses.clear()

    def _take(self, wanted: Mapping[UnitKey, None]) -> UnitKey:
        """Lend one of these, and have the others read meanwhile. Raises what reading raised."""
        started = time.perf_counter()
        while True:
            with self._changed:
                if self._is_closed:
                    raise RuntimeError("closed while experts were in use")
                reads = self._ask(wanted)
                found = next((key for key in wanted if self._is_done(key)), None)
                if found is not None:
                    arrival = self._arrivals[found]
                    self._lend(found, arrival)
                elif not reads:
                    self._changed.wait()
            for read in reads:
                read.add_done_callback(self._on_read)
            if found is not None:
                self.stall_s += time.perf_counter() - started
                arrival.read.result()
                return found

    # ------------------------------------------------------------ with the lock held

    def _is_done(self, key: UnitKey) -> bool:
        return key in self._arrivals and self._arrivals[key].read.done()

    def _is_there(self, key: UnitKey) -> bool:
        return self._is_done(key) and not self._arrivals[key].has_failed

    def _lend(self, key: UnitKey, arrival: Arrival) -> None:
        """A unit whose reading failed is forgotten: the next one who asks has it read anew."""
        if arrival.has_failed:
            self._drop(key)
            return
        arrival.is_lent = True
        self._num_uses += 1
        self._last_uses[key] = self._num_uses

    def _ask(self, wanted: Mapping[UnitKey, None]) -> list[Future[int]]:
        """Have those read that are not there, as long as there are slots for them."""
        reads: list[Future[int]] = []
        for key in wanted:
            if key in self._arrivals:
                continue
            if self._clock.num_reads >= MAX_READS or not self._make_room(wanted):
                break
            slot = self._free_slots.pop(0)
            read = self._reader.submit(key, self._slots[slot])
            self._arrivals[key] = Arrival(self._slots[slot], read, slot)
            self._clock.begin()
            reads.append(read)
        return reads

    def _make_room(self, wanted: Mapping[UnitKey, None]) -> bool:
        """Whether a slot is free, if need be that of a unit which nobody uses or waits for."""
        if self._free_slots:
            return True
        idle = {
            key: last_use
            for key, last_use in self._last_uses.items()
            if key not in wanted and not self._arrivals[key].is_lent
        }
        given_up = victim(idle, self.num_slots, self._num_per_sweep)
        if given_up is not None:
            self._drop(given_up)
        return given_up is not None

    def _drop(self, key: UnitKey) -> None:
        arrival = self._arrivals.pop(key)
        self._last_uses.pop(key, None)
        assert arrival.slot is not None
        self._free_slots.append(arrival.slot)

    def _on_read(self, read: Future[int]) -> None:
        """On a reading thread."""
        with self._changed:
            self._clock.end(read)
            if read.exception() is None:
                self.streamed_bytes += read.result()
            self._changed.notify_all()
