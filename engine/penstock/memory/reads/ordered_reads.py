"""OrderedReads: ranges of files that Linux reads by itself, begun one after the other by a thread of C
(ordered_reads.c), which needs no interpreter's lock.

A range has its end when the next one begins, so that a thread that computes with ranges in their order waits
for one at a time. The plain twin is DirectReader.submit(), whose reads a thread of Python's waits for."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import cache
from pathlib import Path

from penstock.memory.reads.block_reads import OpenFile, change_of

#: Ranges that are given and not seen to end at the same time, and the states of their tickets (the C file).
NUM_TICKETS = 64
_FREE, _DONE = 0, 3
#: What penstock_take_read_back() did.
_TAKEN_BACK, _GIVEN_UP = 1, 2
#: A range is read in parts, of which so many are under way: the next part is asked for before the last one
#: has ended. Smaller parts would cost the computing threads more than they save.
PART_BYTES, NUM_PARTS = 1 << 21, 2

_P, _N, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIGNATURES = {
    "penstock_open_reads": (_P, (_I, _N)),
    "penstock_give_read": (None, (_P, _I, _I, _N, _N, _N, _N, _N)),
    "penstock_take_read_back": (_I, (_P, _I)),
    "penstock_num_ended_reads": (_N, (_P,)),
    "penstock_wait_for_reads": (None, (_P, _N)),
    "penstock_wait_for_read": (_I, (_P, _I, _I)),
    "penstock_close_reads": (None, (_P,)),
}


class _Tickets(ctypes.Structure):
    """The beginning of the ordered_reads of the C file."""

    _fields_ = (
        ("states", ctypes.c_int32 * NUM_TICKETS), ("ended_s", ctypes.c_double * NUM_TICKETS),
        ("waited_s", ctypes.c_double),
    )  # fmt: skip


@cache
def _library() -> ctypes.CDLL | None:
    """None where the C file was not compiled."""
    path = min(Path(__file__).parent.glob("_ordered_reads.*so"), default=None)
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    for name, (result, parameters) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, parameters
    return library


class OrderedRead:
    """A range that is read, with those methods of a Future that its one user calls."""

    def __init__(
        self,
        reads: OrderedReads,
        file: OpenFile,
        ticket: int,
        num_bytes: int,
        again: Callable[[], Future[int]],
    ):
        self.reads = reads
        self._file = file
        self._ticket = ticket
        self._num_bytes = num_bytes
        self._again: Callable[[], Future[int]] | None = again
        self._failure: BaseException | None = None
        #: Nobody wants the range any more, which fails unless somebody asks for it again.
        self.is_given_up = False
        #: When the read ended, by time.perf_counter(); 0 until exception() or result() was asked for.
        self.ended_s = 0.0

    @property
    def ticket(self) -> int:
        """The number by which C knows the read; -1: it has ended. Raises what reading raised."""
        if self._again is None:
            self.result()
            return -1
        return self._ticket

    def done(self) -> bool:
        return self._again is None or self.reads.states[self._ticket] >= _DONE

    def exception(self) -> BaseException | None:
        """Waits for the end. A range that the system did not read is read again the plain way, which also
        finds the reason. What was computed with a range meanwhile counts only if this returns None."""
        if self._again is not None:
            self.reads.wait_for(self._ticket)
            again, self._again = self._again, None
            self.ended_s = self.reads.ended_s[self._ticket]
            has_failed = self.reads.states[self._ticket] != _DONE
            self.reads.free(self._ticket)
            if has_failed:
                self._failure = CancelledError() if self.is_given_up else _failure_of(again)
            else:
                self._failure = change_of(self._file)
        return self._failure

    def result(self) -> int:
        """The number of bytes. Raises what reading raised."""
        failure = self.exception()
        if failure is not None:
            raise failure
        return self._num_bytes

    def cancel(self) -> bool:
        """Whether nothing of the range is read, now or later. Otherwise the range is given up, if parts of it
        have not begun: it ends when those that are under way have ended."""
        if self._again is None or self.is_given_up:
            return False
        what = self.reads.take_back(self._ticket)
        if what == _TAKEN_BACK:
            self._again, self._failure = None, CancelledError()
        self.is_given_up = what == _GIVEN_UP
        return what == _TAKEN_BACK

    def wait_for_any(self) -> None:
        """Until this read or another one of the same reads has ended, if this one has not."""
        self.reads.wait_for_any(self._ticket)


def _failure_of(again: Callable[[], Future[int]]) -> BaseException | None:
    """What reading the plain way raises, when it is asked for or later."""
    try:
        return again().exception()
    except Exception as error:
        return error


class OrderedReads:
    """One thread at a time gives and waits for reads. The end of the object closes, too."""

    def __init__(self, part_bytes: int = PART_BYTES, num_parts: int = NUM_PARTS) -> None:
        """Raises OSError where the system has no such reads, or the C file was not compiled."""
        library = _library()
        address = library.penstock_open_reads(num_parts, part_bytes) if library is not None else None
        if library is None or address is None:
            raise OSError("no ordered reads")
        self._library, self.address = library, address
        #: The address of penstock_wait_for_read(), for C that computes what is read.
        self.wait_address = ctypes.cast(library.penstock_wait_for_read, _P).value or 0
        self._tickets = tickets = _Tickets.from_address(address)
        self.states, self.ended_s = tickets.states, tickets.ended_s
        self._free = deque(range(NUM_TICKETS))
        self._closing = weakref.finalize(self, library.penstock_close_reads, address)
        self._closing.atexit = False  # threads that wait for reads may outlive Python

    def give(
        self, file: OpenFile, offset: int, address: int, num_bytes: int, again: Callable[[], Future[int]]
    ) -> OrderedRead:
        """Read a range after all that were given before: offset and address in whole pages, with room for
        whole pages. Nothing is read of a file that was changed. `again` reads the range the plain way."""
        was = file.identity
        assert was is not None
        ticket = self._free.popleft()
        self._library.penstock_give_read(
            self.address, ticket, file.descriptor, was.num_bytes, was.modified_ns, offset, address, num_bytes
        )
        return OrderedRead(self, file, ticket, num_bytes, again)

    def take_back(self, ticket: int) -> int:
        """Take back what has not begun of a range: _TAKEN_BACK, _GIVEN_UP, or 0 if all of it has begun."""
        what: int = self._library.penstock_take_read_back(self.address, ticket)
        if what == _TAKEN_BACK:
            self._free.append(ticket)
        return what

    def wait_for(self, ticket: int) -> None:
        while self.states[ticket] < _DONE:
            self.wait_for_any(ticket)

    def wait_for_any(self, ticket: int) -> None:
        if self._is_closed:
            return
        seen = self._library.penstock_num_ended_reads(self.address)
        if self.states[ticket] < _DONE:
            self._library.penstock_wait_for_reads(self.address, seen)

    @property
    def waited_s(self) -> float:
        """Seconds for which C waited by `wait_address` since the start."""
        return 0.0 if self._is_closed else self._tickets.waited_s

    def free(self, ticket: int) -> None:
        """Its range's end was seen."""
        self.states[ticket] = _FREE
        self._free.append(ticket)

    @property
    def _is_closed(self) -> bool:
        return not self._closing.alive

    def close(self) -> None:
        """Wait for what is under way. All reads have been seen to end, or nobody asks for them any more.
        Idempotent."""
        self._closing()
