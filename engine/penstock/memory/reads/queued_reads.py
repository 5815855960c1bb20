"""QueuedReads: reads that Linux does by itself. One call queues them, another one waits for their ends (Linux
AIO, man 2 io_submit), so that no thread stands behind each of them.

With two cores that multiply, threads that read come late to the disk and take the interpreter's lock from the
thread that computes: reading experts one by one took a fifth longer so, and the products beside it, too.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
from collections.abc import Sequence
from typing import NamedTuple

#: Numbers of the calls io_setup, io_destroy, io_submit and io_getevents, which the C library does not name.
_CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
_PREAD = 0
#: Whether the system queues reads of a device's files, by the device's number.
_tried: dict[int, bool] = {}
#: Bytes of a read that shows whether reads are queued, and the most of these reads: one that was queued may
#: have ended when a busy machine lets the thread look.
_TRIAL_BYTES, _NUM_TRIALS = 1 << 20, 8


class _Order(ctypes.Structure):
    """The struct iocb of linux/aio_abi.h, on a little-endian machine."""

    _fields_ = (
        ("key", ctypes.c_uint64), ("reserved", ctypes.c_uint32), ("rw_flags", ctypes.c_int32),
        ("opcode", ctypes.c_uint16), ("priority", ctypes.c_int16), ("descriptor", ctypes.c_uint32),
        ("address", ctypes.c_uint64), ("num_bytes", ctypes.c_uint64), ("offset", ctypes.c_int64),
        ("reserved2", ctypes.c_uint64), ("flags", ctypes.c_uint32), ("event_descriptor", ctypes.c_uint32),
    )  # fmt: skip


class _End(ctypes.Structure):
    """The struct io_event."""

    _fields_ = (
        ("key", ctypes.c_uint64), ("order", ctypes.c_uint64), ("result", ctypes.c_int64),
        ("result2", ctypes.c_int64),
    )  # fmt: skip


class QueuedRead(NamedTuple):
    """A read past the page cache: descriptor, offset, address and length as O_DIRECT wants them."""

    key: int
    descriptor: int
    offset: int
    address: int
    num_bytes: int


class QueuedReads:
    """At most `depth` reads are under way. One thread at a time may submit, and another one wait."""

    def __init__(self, depth: int) -> None:
        """Raises OSError where the system has no such reads."""
        calls = _CALLS.get(platform.machine())
        if sys.platform != "linux" or sys.byteorder != "little" or calls is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._setup, self._destroy, self._submit, self._ends = calls
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        self._orders = (_Order * depth)()
        self._addresses = (ctypes.c_void_p * depth)(*(ctypes.addressof(order) for order in self._orders))
        self._ended = (_End * depth)()
        self._context = ctypes.c_ulong(0)
        self._checked(
            self._call(ctypes.c_long(self._setup), ctypes.c_long(depth), ctypes.byref(self._context))
        )

    def submit(self, reads: Sequence[QueuedRead]) -> int:
        """How many of these reads, the first ones, are under way now. Raises OSError if there is none."""
        for order, read in zip(self._orders, reads, strict=False):
            order.opcode = _PREAD
            order.key, order.descriptor, order.offset, order.address, order.num_bytes = read
        count = ctypes.c_long(min(len(reads), len(self._orders)))
        call = ctypes.c_long(self._submit)
        return self._checked(self._call(call, self._context, count, self._addresses))

    def wait(self, least: int = 1) -> list[tuple[int, int]]:
        """Key and result of the reads that have ended: bytes, or an error's number below 0. Waits until there
        are `least`. Raises OSError once the queue was closed."""
        count = ctypes.c_long(len(self._ended))
        while True:
            try:
                number = self._checked(
                    self._call(
                        ctypes.c_long(self._ends),
                        self._context,
                        ctypes.c_long(least),
                        count,
                        self._ended,
                        None,
                    )
                )
            except InterruptedError:
                continue
            return [(end.key, end.result) for end in self._ended[:number]]

    def close(self) -> None:
        """Wait for all reads. Whoever waits for ends learns that there will be none."""
        self._call(ctypes.c_long(self._destroy), self._context)

    def _checked(self, result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result


def is_queued(descriptor: int) -> bool:
    """Whether the system queues reads of a file that was opened for direct reads. Some file systems (tmpfs,
    or a compressed btrfs) read within the call that should queue: with them, threads read faster. One file of
    each device is tried: to end a queue takes Linux some 35 ms. A read that is not there at once
    was queued."""
    device = os.fstat(descriptor).st_dev
    if device not in _tried:
        _tried[device] = _are_reads_queued(descriptor)
    return _tried[device]


def _are_reads_queued(descriptor: int) -> bool:
    trial = mmap.mmap(-1, _TRIAL_BYTES)
    try:
        reads = QueuedReads(1)
    except OSError:
        return False
    try:
        address = ctypes.addressof(ctypes.c_char.from_buffer(trial))
        for _ in range(_NUM_TRIALS):
            reads.submit([QueuedRead(0, descriptor, 0, address, _TRIAL_BYTES)])
            if not reads.wait(0):
                return True
        return False
    except OSError:
        return False
    finally:
        reads.close()
