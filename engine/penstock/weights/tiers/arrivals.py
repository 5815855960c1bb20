"""Arrivals: the units of one memory, each there or on its way, and the reads that bring them.

Arrivals know the slots, the reads, the lock and how much was read. The tier that owns the arrivals decides
which unit is read next, and which unit gives its slot up."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from torch import Tensor

from penstock.memory.reads.ordered_reads import OrderedRead
from penstock.metrics import Traffic
from penstock.spec import UnitKey
from penstock.weights.tiers.tier import Arrival, OrderingReader, UnitReader

#: Units that are being read at the same time: two keep the link busy, and a unit that is suddenly needed
#: waits behind at most two others.
MAX_READS = 2


class ReadClock:
    """Bytes and busy time of a link. The lock of the arrivals protects the clock."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.num_reads = 0
        self.num_failures = 0
        self._busy_since = 0.0

    def begin(self) -> None:
        if self.num_reads == 0:
            self._busy_since = time.perf_counter()
        self.num_reads += 1

    def end(self, read: Future[int] | OrderedRead) -> None:
        self.num_reads -= 1
        failure = read.exception()
        if self.num_reads == 0:
            ended_s = read.ended_s if isinstance(read, OrderedRead) else time.perf_counter()
            self.traffic.busy_s += max(0.0, ended_s - self._busy_since)
        if failure is None:
            self.traffic.num_bytes += read.result()
        else:
            self.num_failures += 1

    def cancel(self) -> None:
        """A read that had not begun was taken back, beside others that go on."""
        self.num_reads -= 1


class Arrivals:
    """`with arrivals:` holds the lock. When the block ends, reads that began in the block and have ended
    already are counted in a loop: each of them may begin the next read, and a thousand reads that fail at
    once must not nest a thousand calls. Other reads are watched: _on_end() takes the lock. Of ordered reads
    nobody tells: those that have ended are counted when the lock is taken."""

    def __init__(
        self,
        reader: UnitReader,
        slots: Sequence[Tensor],
        ask: Callable[[], object] | None = None,
        max_reads: int = MAX_READS,
        is_ordered: bool = False,
    ) -> None:
        """`slots` are lent to one unit after the other. `ask` is called with the lock held when a read has
        ended, to begin the next ones. At most `max_reads` units are read at the same time. `is_ordered`: all
        of them one after the other, by an OrderingReader that can do so; then one thread at a time uses the
        units. There is no tier with reads of both kinds: nobody who waits for the ends of one kind is told of
        those of the other."""
        self.reader = reader
        self.units: dict[UnitKey, Arrival] = {}
        self.free_slots = list(range(len(slots)))
        self.is_closed = False
        self._slots = slots
        self._ask = ask
        self._max_reads = max_reads
        self.clock = ReadClock()
        #: Bytes and busy seconds of the reads from the tier below.
        self.traffic = self.clock.traffic
        self._lock = threading.Lock()
        #: Told when a read has ended, and when nothing more is read.
        self._changed = threading.Condition(self._lock)
        #: Reads that nobody watches yet.
        self._begun: list[Future[int]] = []
        self._ordering = reader if is_ordered and isinstance(reader, OrderingReader) else None
        self.is_ordered = self._ordering is not None
        #: Ordered reads that have not been seen to end.
        self._ordered: list[OrderedRead] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            if self._ordered:
                self._count_ordered()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *exc: object) -> None:
        if not self._begun:
            self._lock.release()
            return
        under_way = list[Future[int]]()
        try:
            while self._begun:
                read = self._begun.pop(0)
                if read.done():
                    self._count(read)
                else:
                    under_way.append(read)
        finally:
            self._lock.release()
        for read in under_way:
            read.add_done_callback(self._on_end)

    def _count_ordered(self) -> None:
        ended = [read for read in self._ordered if read.done()]
        if ended:
            self._ordered = [read for read in self._ordered if read not in ended]
            self._count(*ended)

    @property
    def can_read(self) -> bool:
        """Whether fewer reads than the most are under way."""
        return self.clock.num_reads < self._max_reads

    @property
    def has_unwatched(self) -> bool:
        """Whether a read began under this lock that may have ended already."""
        return bool(self._begun)

    def stop(self) -> None:
        """Read nothing more."""
        with self:
            self.is_closed = True
            self.changed()

    def close(self) -> None:
        """Read nothing more, and wait for what is being read into our buffers."""
        self.stop()
        with self:
            while self._ordered:
                self.wait()
            reads = [arrival.read for arrival in self.units.values()]
        for read in reads:
            read.exception()
        self.reader.close()
        with self:  # reads, arrivals and tier refer to one another, which would keep all of them alive
            self.units.clear()
            self._ask = None
            self._ordering = None

    # ------------------------------------------------------------ with the lock held

    def begin(self, key: UnitKey, own_buffer: Tensor | None = None) -> None:
        """Read a unit into its own buffer, or into a free slot. Whoever waits for the unit learns of an
        error."""
        slot = None if own_buffer is not None else self.free_slots.pop(0)
        buffer = self._slots[slot] if slot is not None else own_buffer
        assert buffer is not None
        read: Future[int] | OrderedRead
        try:
            if self._ordering is not None:
                read = self._ordering.submit_ordered(key, buffer)
            else:
                read = self.reader.submit(key, buffer)
        except Exception as error:
            self.is_closed = self.is_closed or sys.is_finalizing()
            read = failed = Future[int]()
            failed.set_exception(error)
        self.units[key] = Arrival(buffer, read, slot)
        self.clock.begin()
        if isinstance(read, OrderedRead):
            self._ordered.append(read)
        else:
            self._begun.append(read)

    def forget(self, key: UnitKey, arrival: Arrival) -> None:
        """Give the unit's slot back, if nobody else who met the same error did so before."""
        if self.units.get(key) is not arrival:
            return
        del self.units[key]
        if arrival.slot is not None:
            self.free_slots.append(arrival.slot)

    def wait(self) -> None:
        """Until something has changed."""
        assert not self._begun, "nobody would be told of the ends of these reads"
        if not self._ordered:
            self._changed.wait()
            return
        read = self._ordered[0]
        self._lock.release()
        try:
            read.wait_for_any()
        finally:
            self._lock.acquire()
        self._count_ordered()

    def changed(self) -> None:
        """Wake all who wait()."""
        self._changed.notify_all()

    def coming(self, keys: Iterable[UnitKey]) -> list[tuple[UnitKey, Arrival, OrderedRead]]:
        """Those of these units that ordered reads are bringing, in the order of the reads."""
        found = [(key, self.units[key]) for key in keys if key in self.units]
        of_reads = {arrival.read: (key, arrival) for key, arrival in found}
        return [(*of_reads[read], read) for read in self._ordered if read in of_reads]

    def cancel(self, key: UnitKey) -> bool:
        """Whether a unit was taken back, with its slot, of which nothing is read. Of a unit whose read has
        begun, the rest is not read, and the read fails."""
        arrival = self.units[key]
        read = arrival.read
        if not isinstance(read, OrderedRead) or not read.cancel():
            return False
        self._ordered.remove(read)
        self.clock.cancel()
        self.forget(key, arrival)
        return True

    def revive(self, keys: Iterable[UnitKey]) -> None:
        """These units are wanted: their reads, if they were given up, are made good when they have ended."""
        for read in self._ordered:
            if read.is_given_up and any(self.units[key].read is read for key in keys if key in self.units):
                read.is_given_up = False

    def _count(self, *reads: Future[int] | OrderedRead) -> None:
        """These reads have ended."""
        for read in reads:
            self.clock.end(read)
        if self._ask is not None:
            self._ask()
        self.changed()

    # ------------------------------------------------------------ without the lock

    def _on_end(self, read: Future[int]) -> None:
        """Runs on a reading thread, or on the thread that begins to watch a read that has just ended."""
        with self:
            self._count(read)


def take_back(arrivals: Arrivals) -> list[Tensor]:
    """Take back what a user acquired who is gone and will not release it. Returns the slots' buffers."""
    with arrivals:
        lent = [each for each in arrivals.units.values() if each.is_lent and each.slot is not None]
        for each in lent:
            each.is_lent = False
    return [each.buffer for each in lent]
