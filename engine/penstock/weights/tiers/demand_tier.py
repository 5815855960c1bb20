"""A memory and the units in it that somebody asked for: experts of a mixture.

All units have slots of one size, allocated at the start. A unit stays until the policy gives its slot to
another. Which expert a token needs is known only in its layer. So a unit is read when it is asked for, and
before that only while the disk has little else to do and a guess says that the next layer asks for it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from penstock.memory.pools import MemoryPool
from penstock.memory.reads.ordered_reads import OrderedRead
from penstock.spec import UnitKey
from penstock.weights.tiers.arrivals import Arrivals
from penstock.weights.tiers.arriving_reads import ArrivingReads
from penstock.weights.tiers.expected_units import ExpectedUnits
from penstock.weights.tiers.expert_policy import ExpertPolicy
from penstock.weights.tiers.expert_slots import ExpertSlots
from penstock.weights.tiers.tier import Arrival, OrderingReader, UnitReader
from penstock.weights.tiers.use_counts import UseCounts

#: Experts that are being read at the same time. The disk's reader cuts each into blocks and has a few of
#: these in flight; so many experts keep it busy while the next ones are asked for.
MAX_EXPERT_READS = 16
#: A guessed unit is read while fewer reads than these are under way: what the next layer really asks for
#: then waits for one wrong guess at most.
MAX_EARLY_READS = 1
#: The same where reads are ordered: guessed units that wait behind all others, and are taken back when the
#: layer asks for others before their reads have begun.
MAX_EARLY_ORDERED = 3
#: Units that are lent together, with their keys.
Group = list[tuple[UnitKey, Arrival]]


class DemandTier:
    """One user at a time: it gathers (or acquires) units, and releases them."""

    def __init__(
        self,
        sizes: Mapping[UnitKey, int],
        reader: UnitReader,
        pool: MemoryPool,
        num_slots: int,
        uses: UseCounts[UnitKey],
        pins: bool = False,
        is_alone: bool = False,
    ) -> None:
        """`sizes` are the units' bytes in whole pages; `pool` has room for pool_bytes(); the tier counts
        `uses`. `pins`: see ExpertPolicy. `is_alone`: there is no other memory between the files and where
        experts are computed; units are then read one after the other where the reader can do so with every
        one of them (Arrivals)."""
        if num_slots < 1:
            raise ValueError("units that are asked for need a slot")
        self.num_slots = min(num_slots, len(sizes))
        #: Units by stack and layer.
        self.num_units = Counter((key.stack, key.layer) for key in sizes)
        slot_bytes = max(sizes.values())
        slots = [pool.allocate(f"expert.{index}", slot_bytes) for index in range(self.num_slots)]
        self.uses = uses
        self.policy = ExpertPolicy(self.num_slots, uses, pins)
        self.is_alone = is_alone
        is_ordered = is_alone and isinstance(reader, OrderingReader) and reader.can_order(sizes)
        self.arrivals = Arrivals(reader, slots, self._ask, MAX_EXPERT_READS, is_ordered)
        self.slots = ExpertSlots(self.arrivals, self.policy)
        #: Units that began to arrive since the start, by stack and layer.
        self.num_arrived: dict[tuple[str, int], int] = {}
        #: What the user asked for and was not lent yet, or has taken by take_present(); and about how many
        #: units the whole sweep asks for.
        self._wanted: Mapping[UnitKey, None] = {}
        self._num_in_sweep = 0
        #: Whether somebody computes with any of the units that are there: none gives its slot up.
        self._has_run = False
        self.expected = ExpectedUnits[UnitKey]()
        #: Units of which reads began by a guess, and that nobody has counted yet.
        self._early: set[UnitKey] = set()
        #: How often units were taken back from users who were gone.
        self._num_taken_back = 0
        #: Units that were asked for, and units of these that were there without a guess.
        self.num_asked = self.num_hits = 0
        #: Seconds for which gather() and acquire() waited.
        self.stall_s = 0.0

    @staticmethod
    def pool_bytes(sizes: Mapping[UnitKey, int], num_slots: int) -> int:
        """Bytes that a tier takes from its pool."""
        return min(num_slots, len(sizes)) * max(sizes.values(), default=0)

    def gather(self, keys: Sequence[UnitKey]) -> Iterator[Group]:
        """Each of these units once, in groups: first all units that are there, then those that have arrived
        meanwhile. A group stays until the next one is asked for. Raises what reading raised."""
        waiting, num_taken_back = dict.fromkeys(keys), self._num_taken_back
        with self.arrivals:
            group = self._want(waiting)
        while group or waiting:
            group = group or self._take(waiting)
            try:
                yield group
            finally:
                # Who was thought to be gone and comes back late takes nothing from the next user.
                if num_taken_back == self._num_taken_back:
                    self._release(group, waiting)
            group = []

    def gather_arriving(self, keys: Sequence[UnitKey]) -> Iterator[tuple[Group, ArrivingReads | None]]:
        """What gather() brings: the first group has all units that are there, and then those that ordered
        reads are bringing, with these reads, for which the user waits."""
        waiting, num_taken_back = dict.fromkeys(keys), self._num_taken_back
        with self.arrivals:
            group = self._want(waiting)
            coming = self._add_coming(group, waiting) if waiting else []
        while group or waiting:
            group = group or self._take(waiting)
            arriving = ArrivingReads(coming) if coming else None
            try:
                yield group, arriving
            finally:
                if arriving is not None:
                    self.stall_s += arriving.waited_s
                if num_taken_back == self._num_taken_back:
                    self._release(group, waiting)
            group, coming = [], []
            if waiting:
                with self.arrivals:
                    group = self._lend(waiting, self.slots.arrived(waiting))
                    coming = self._add_coming(group, waiting)

    def take_present(self, keys: Sequence[UnitKey]) -> list[Arrival] | None:
        """What gather_arriving() brings if it brings all of these units, each once, at the first look; they
        stay until anything else is asked for. None: it does not, and nothing was asked for."""
        with self.arrivals:
            group = self.slots.arrived(keys)
            found = [arrival for _, arrival in group if arrival.is_there or not arrival.has_failed]
            if len(found) < len(keys) or self.arrivals.is_closed:
                return None
            self._count_asked(keys, keys)
            self.slots.use(group)
            self._wanted = dict.fromkeys(keys)
        return found

    def holds(self, key: UnitKey, arrival: Arrival) -> bool:
        """Whether a unit has not given its slot up since it was lent."""
        return self.arrivals.units.get(key) is arrival

    def begin_run(self) -> Group:
        """Until end_run() no unit gives its slot up. Returns the units that the last guess has had read, but
        for those that failed."""
        with self.arrivals:
            self._check_open()
            self._has_run = True
            units = self.arrivals.units
            return [(key, units[key]) for key in self.expected.begun if not units[key].has_failed]

    def end_run(self, asked: Iterable[Sequence[UnitKey]]) -> None:
        """Layers asked for these units, one layer after the other, and all of them were there. Those of the
        last layer stay until anything else is asked for."""
        with self.arrivals:
            self._has_run = False
            for keys in asked:
                self._count_asked(keys, keys)
                self.policy.use(keys)
                self._wanted = dict.fromkeys(keys)

    @property
    def is_ordered(self) -> bool:
        """Whether units are read one after the other."""
        return self.arrivals.is_ordered

    @property
    def holds_all(self) -> bool:
        """Whether every unit has a slot."""
        return self.num_slots == self.num_units.total()

    def expect(self, keys: Sequence[UnitKey]) -> None:
        """The next gather() asks for these units, if the guess is right. Nothing depends on it but time."""
        with self.arrivals:
            self.expected.expect(keys, self.arrivals.units)
            self._ask()

    def acquire(self, key: UnitKey) -> Arrival:
        """Wait for a unit; the unit stays until it is released. Raises what reading raised."""
        waiting = {key: None}
        with self.arrivals:
            group = self._want(waiting)
        ((_, arrival),) = group or self._take(waiting)
        return arrival

    def _release(self, group: Group, waiting: Mapping[UnitKey, None]) -> None:
        """The next group is asked for, or the user needs no more. What is still waited for stays wanted: no
        guess may take its place between two groups."""
        with self.arrivals:
            self._wanted = waiting
            for key, _ in group:
                self.slots.lent.pop(key, None)

    def release(self, key: UnitKey) -> None:
        with self.arrivals:
            self.slots.lent.pop(key, None)

    def take_back(self) -> list[Tensor]:
        """Take back what a user gathered or acquired who is gone and will not release it. Returns the
        buffers."""
        with self.arrivals:
            self._num_taken_back += 1
            self._wanted, self._has_run = {}, False
            buffers = [arrival.buffer for arrival in self.slots.lent.values()]
            self.slots.lent.clear()
        return buffers

    def close(self) -> None:
        """Read nothing more, and wait for what is being read into our slots."""
        self.arrivals.close()

    def _take(self, waiting: dict[UnitKey, None]) -> Group:
        """Lend those of these units that are there, and wait if none is. Raises what reading raised."""
        started = time.perf_counter()
        group: Group = []
        while not group:
            with self.arrivals:
                group = self._lend(waiting, self.slots.arrived(waiting))
                if not (group or self.arrivals.has_unwatched):
                    self.arrivals.wait()
        self.stall_s += time.perf_counter() - started
        return group

    # ------------------------------------------------------------ with the lock of the arrivals held

    def _want(self, waiting: dict[UnitKey, None]) -> Group:
        """A layer asks for these units, each once. Lends those that are there, and has the others read
        meanwhile. A read that failed before anybody waited for it is tried once more."""
        self.arrivals.revive(waiting)
        there = self.slots.arrived(waiting)
        if failed := [each for each in there if not each[1].is_there and each[1].has_failed]:
            for key, _ in failed:
                self.slots.drop(key)
            there = [each for each in there if each not in failed]
        self._count_asked(waiting, [key for key, _ in there])
        return self._lend(waiting, there)

    def _count_asked(self, keys: Collection[UnitKey], there: Collection[UnitKey]) -> None:
        """A layer asks for these units, of which some are there."""
        self.num_asked += len(keys)
        self.num_hits += len(there)
        if self.expected.kept or self._early:
            early, self._early = self.settle(keys), set()
            self.num_hits -= len(early.intersection(there))
        self.uses.add(keys)
        self._num_in_sweep = len(keys) * len(self.num_units)

    def _lend(self, waiting: dict[UnitKey, None], group: Group) -> Group:
        """Lend those of these units whose reads have ended, and have the others read. What is lent is not
        waited for any more. Raises what reading raised; the unit is forgotten, and the next one who asks has
        it read anew."""
        self._check_open()
        for key, arrival in group:
            if not arrival.is_there and arrival.has_failed:
                self.slots.drop(key)
                self._wanted = {}
                arrival.read.result()
            del waiting[key]
        self.slots.lend(group)
        self._wanted = waiting
        if waiting:
            self._ask(takes_pinned=not group)
        return group

    def _check_open(self) -> None:
        if self.arrivals.is_closed:
            raise RuntimeError("the engine was closed while its experts were in use")

    def _add_coming(self, group: Group, waiting: dict[UnitKey, None]) -> list[OrderedRead]:
        """Lends those of these units that are being read after a group. Returns their reads."""
        reads = list[OrderedRead]()
        if 0 < len(waiting) <= MAX_EXPERT_READS:
            for key, arrival, read in self.arrivals.coming(waiting):
                del waiting[key]
                self.slots.lent[key] = arrival
                group.append((key, arrival))
                reads.append(read)
        return reads

    def _ask(self, takes_pinned: bool = False) -> None:
        """Read the wanted units that are not there, as long as there are slots for them, and then some that
        are expected. `takes_pinned`: nothing is lent whose slot could be waited for."""
        if self._has_run:
            return
        for key in self._wanted:
            if key in self.arrivals.units:
                continue
            if self.arrivals.is_closed or not self.arrivals.can_read:
                return
            if not self.slots.make_room(self._kept(), self._num_in_sweep, takes_pinned):
                return
            self.begin(key)
        for key in self.expected.to_read():
            if self.arrivals.is_closed or not self._can_read_early:
                break
            if not self.slots.make_room(self._kept(), self._num_in_sweep, takes_pinned=False):
                break
            self.begin(key)
            self.expected.begin(key)

    @property
    def _can_read_early(self) -> bool:
        if self.is_ordered:
            return self.arrivals.can_read and self.expected.num_begun < MAX_EARLY_ORDERED
        return self.arrivals.clock.num_reads < MAX_EARLY_READS

    def settle(self, keys: Collection[UnitKey]) -> set[UnitKey]:
        """The layer asks: nothing is guessed any more. Returns the units of these whose reads have begun
        early, until they are asked for."""
        for key in self.expected.begun_beside(keys):
            if key in self.arrivals.units and self.slots.cancel(key):
                self.expected.cancel(key)
                self.num_arrived[key.stack, key.layer] -= 1
        self._early = self.expected.settle(keys) | self._early.intersection(keys)
        return self._early

    def _kept(self) -> Container[UnitKey]:
        """Units that give no slot up."""
        return self.expected.kept.union(self._wanted) if self.expected.kept else self._wanted

    def begin(self, key: UnitKey) -> None:
        """Read a unit into a free slot."""
        self.slots.begin(key)
        place = key.stack, key.layer
        self.num_arrived[place] = self.num_arrived.get(place, 0) + 1
