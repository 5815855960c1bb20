"""A memory and the units in it that somebody asked for: experts of a mixture.

All units have slots of one size, allocated at the start. A unit stays until policies.victim() gives its slot
to another. Nothing is read ahead: which expert a token needs is known only in its layer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from penstock.memory.pools import MemoryPool
from penstock.spec import UnitKey
from penstock.weights.tiers.arrivals import Arrivals, take_back
from penstock.weights.tiers.policies import victim
from penstock.weights.tiers.tier import Arrival, UnitReader


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
        slot_bytes = max(sizes.values())
        slots = [pool.allocate(f"expert.{index}", slot_bytes) for index in range(self.num_slots)]
        self.arrivals = Arrivals(reader, slots)
        #: The number of a unit's last use; a unit that was read and never used has none.
        self._last_uses: dict[UnitKey, int] = {}
        self._num_uses = 0
        #: How often units were taken back from users who were gone.
        self._num_taken_back = 0
        #: Units that were asked for, and units of these that were there.
        self.num_asked = self.num_hits = 0
        #: Seconds for which gather() and acquire() waited.
        self.stall_s = 0.0

    @staticmethod
    def pool_bytes(sizes: Mapping[UnitKey, int], num_slots: int) -> int:
        """Bytes that a tier takes from its pool."""
        return min(num_slots, len(sizes)) * max(sizes.values(), default=0)

    def gather(self, keys: Sequence[UnitKey]) -> Iterator[tuple[UnitKey, Arrival]]:
        """Each of these units once: first the units that are there, then the others in the order in which
        they arrive. A unit stays until the next one is asked for. Raises what reading raised."""
        waiting, num_taken_back = dict.fromkeys(keys), self._num_taken_back
        with self.arrivals:
            self.num_asked += len(waiting)
            self.num_hits += sum(
                key in self.arrivals.units and self.arrivals.units[key].has_arrived for key in waiting
            )
        while waiting:
            key, arrival = self._take(waiting)
            del waiting[key]
            try:
                yield key, arrival
            finally:
                # Who was thought to be gone and comes back late takes nothing from the next user.
                if num_taken_back == self._num_taken_back:
                    self.release(key)

    def acquire(self, key: UnitKey) -> Arrival:
        """Wait for a unit; the unit stays until it is released. Raises what reading raised."""
        return self._take({key: None})[1]

    def release(self, key: UnitKey) -> None:
        with self.arrivals:
            arrival = self.arrivals.units.get(key)
            if arrival is not None:  # it was not closed in the meantime
                arrival.is_lent = False

    def take_back(self) -> list[Tensor]:
        """Take back what a user gathered or acquired who is gone and will not release it. Returns the
        buffers."""
        with self.arrivals:
            self._num_taken_back += 1
        return take_back(self.arrivals)

    def close(self) -> None:
        """Read nothing more, and wait for what is being read into our slots."""
        self.arrivals.close()
        self._last_uses.clear()

    def _take(self, wanted: Mapping[UnitKey, None]) -> tuple[UnitKey, Arrival]:
        """Lend one of these units, and have the others read meanwhile. Raises what reading raised. A read
        that failed before anybody waited for it is tried once more."""
        started = time.perf_counter()
        with self.arrivals:
            for key in _failed(self.arrivals.units, wanted):
                self._drop(key)
        found = None
        while found is None:
            with self.arrivals:
                if self.arrivals.is_closed:
                    raise RuntimeError("the engine was closed while its experts were in use")
                has_begun = self._ask(wanted)
                found = self._lend_one(wanted)
                if found is None and not has_begun:
                    self.arrivals.wait()
        self.stall_s += time.perf_counter() - started
        found[1].read.result()
        return found

    # ------------------------------------------------------------ with the lock of the arrivals held

    def _lend_one(self, wanted: Mapping[UnitKey, None]) -> tuple[UnitKey, Arrival] | None:
        """The first of these units whose read has ended. A unit whose read failed is forgotten: the next one
        who asks has it read anew."""
        units = self.arrivals.units
        key = next((key for key in wanted if key in units and units[key].read.done()), None)
        if key is None:
            return None
        arrival = units[key]
        if arrival.has_failed:
            self._drop(key)
        else:
            arrival.is_lent = True
            self._num_uses += 1
            self._last_uses[key] = self._num_uses
        return key, arrival

    def _ask(self, wanted: Mapping[UnitKey, None]) -> bool:
        """Read the units that are not there, as long as there are slots for them. Returns whether a read has
        begun."""
        has_begun = False
        for key in wanted:
            if key in self.arrivals.units:
                continue
            if not self.arrivals.can_read or not self._make_room(wanted):
                break
            self.arrivals.begin(key)
            has_begun = True
        return has_begun

    def _make_room(self, wanted: Mapping[UnitKey, None]) -> bool:
        """Whether a slot is free, if need be the slot of a unit that nobody uses or waits for."""
        if self.arrivals.free_slots:
            return True
        # A unit whose user went away before the unit arrived was never used: it counts as used long ago.
        idle = {
            key: self._last_uses.get(key, 0)
            for key, arrival in self.arrivals.units.items()
            if key not in wanted and not arrival.is_lent and arrival.read.done()
        }
        failed = _failed(self.arrivals.units, idle)
        given_up = failed[0] if failed else victim(idle, self.num_slots, self._num_per_sweep)
        if given_up is not None:
            self._drop(given_up)
        return given_up is not None

    def _drop(self, key: UnitKey) -> None:
        self._last_uses.pop(key, None)
        self.arrivals.forget(key, self.arrivals.units[key])


def _failed(units: Mapping[UnitKey, Arrival], keys: Iterable[UnitKey]) -> list[UnitKey]:
    """Those of `keys` whose reads have failed."""
    return [key for key in keys if key in units and units[key].has_failed]
