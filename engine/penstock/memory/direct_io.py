"""DirectReader reads ranges of files straight into memory, past the page cache, several reads in flight.

O_DIRECT makes the memory budget real, since the kernel keeps no second copy, and O_DIRECT is faster than the
page cache for what is read once per sweep. Addresses, offsets and lengths must be multiples of the disk's
block; a page is enough everywhere. One read at a time leaves most of a disk's rate unused, so each range is
cut into blocks, a few of which are in flight (reads/). Blocks are read in the order in which ranges
were submitted, and the blocks of the next range begin while the last ones of this range are still in flight.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from penstock.memory.ordinary_file import FileIdentity, open_ordinary, unreadable
from penstock.memory.pages import PAGE, round_up
from penstock.memory.reads.block_reads import (
    Block,
    BlockReads,
    OpenFile,
    Preadv,
    QueuedBlocks,
    Range,
    ThreadedBlocks,
)
from penstock.memory.reads.ordered_reads import OrderedRead, OrderedReads
from penstock.memory.reads.patient import patiently
from penstock.memory.reads.queued_reads import is_queued

logger = logging.getLogger(__name__)

#: Block size and reads in flight for a disk that was not measured.
DEFAULT_BLOCK_BYTES, DEFAULT_DEPTH = 4 << 20, 4

#: Linux' number, which Python does not name.
MADV_POPULATE_WRITE = 23
#: Bytes whose pages are asked for in one call.
POPULATED_BYTES = 4 << 20


def aligned_buffer(num_bytes: int) -> Tensor:
    """uint8 [num_bytes, rounded up to whole pages], zeroed, on a page boundary. The memory goes back to the
    system when the tensor dies. Huge pages, where the system has them, need fewer faults and address
    look-ups."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(aligned_pages(num_bytes), dtype=torch.uint8)


def aligned_pages(num_bytes: int) -> mmap.mmap:
    """Zeroed memory of `num_bytes`, rounded up to whole pages; huge pages where the system has them."""
    pages = mmap.mmap(-1, round_up(num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages
            logger.debug("no huge pages")
    return pages


class PopulatedAhead:
    """A thread that makes the system find and clear a buffer's pages, from the start of the buffer on, while
    reads fill it. A read into pages that are not there yet waits for them while the disk is idle: reading
    10 GB into fresh memory on two cores lost a third of the time so."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="penstock-pages", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all pages are there."""
        self._thread.join()

    def close(self) -> None:
        """Ask for no more pages."""
        self._is_stopped = True
        self._thread.join()

    def _run(self) -> None:
        start, end = self._buffer.data_ptr(), self._buffer.data_ptr() + self._buffer.numel()
        madvise = ctypes.CDLL(None).madvise  # mmap.madvise() would hold the interpreter's lock
        for at in range(start, end, POPULATED_BYTES):
            num_bytes = ctypes.c_size_t(min(POPULATED_BYTES, end - at))
            if self._is_stopped or madvise(ctypes.c_void_p(at), num_bytes, MADV_POPULATE_WRITE):
                break  # a kernel before 5.14: pages come when they are first touched


class DirectReader:
    """Reads that Linux queues, or a few threads that read. Close the reader, or use `with`."""

    def __init__(
        self,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        depth: int = DEFAULT_DEPTH,
        preadv: Preadv | None = None,
    ) -> None:
        """`depth` reads of `block_bytes` (whole pages) are in flight at a time. `preadv`: read by this
        function, on threads."""
        if block_bytes <= 0 or block_bytes % PAGE or depth < 1:
            raise ValueError(f"block_bytes {block_bytes} must be whole pages, depth {depth} at least 1")
        self._block_bytes = block_bytes
        self._depth = depth
        self._preadv = preadv
        self._files: dict[Path, OpenFile] = {}
        #: What files were before, where this is known.
        self._known: Mapping[Path, FileIdentity] = {}
        #: Numbers of devices of which a direct read has worked.
        self._direct_devices: set[int] = set()
        self._lock = threading.Lock()

    @cached_property
    def _threads(self) -> ThreadedBlocks:
        return ThreadedBlocks(self._depth, self._preadv or os.preadv)

    @cached_property
    def _queue(self) -> QueuedBlocks:
        return QueuedBlocks(self._depth)

    @cached_property
    def _ordered(self) -> OrderedReads | None:
        try:
            return OrderedReads()
        except OSError as error:
            logger.debug("reads are not ordered: %s", error)
            return None

    def __enter__(self) -> DirectReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def expect(self, known: Mapping[Path, FileIdentity]) -> None:
        """Take no other files than these in their places: their headers were read."""
        self._known = known

    def submit(self, path: Path, offset: int, num_bytes: int, buffer: Tensor) -> Future[int]:
        """Read `num_bytes` from `offset` on into `buffer`. The offset and the buffer lie on page boundaries,
        and the buffer has room for num_bytes rounded up to whole pages. Anything may be written after the
        last byte, up to the end of its page.

        The result is num_bytes. The future, or this call, raises CorruptFile if the file ends early, can't be
        read, or was changed since it was first read, even while this range was read.
        """
        address = _checked_address(offset, num_bytes, buffer)
        file = self._open(path)
        file.check()
        whole = Range(file, Future(), num_bytes)
        starts = range(0, num_bytes, self._block_bytes)
        whole.num_blocks = len(starts)
        if not starts:
            whole.future.set_result(0)
        blocks = []
        for start in starts:
            length = min(self._block_bytes, num_bytes - start)
            blocks.append(Block(whole, buffer, start, address + start, offset + start, length))
        self._reads_of(whole.file).put(blocks)
        return whole.future

    def can_order(self, paths: Iterable[Path]) -> bool:
        """Whether order() can read all these files: the system queues reads of each. Raises CorruptFile."""
        if self._preadv is not None or self._ordered is None:
            return False
        return all(self._open(path).is_queued for path in paths)

    def order(self, path: Path, offset: int, num_bytes: int, buffer: Tensor) -> OrderedRead:
        """What submit() does, after all ranges that were ordered before: one range after the other, by a
        thread of C. One thread at a time orders, and asks for ends. The range is not empty, and can_order()
        has said that the file's reads can be ordered."""
        address = _checked_address(offset, num_bytes, buffer)
        file = self._open(path)
        assert self._ordered is not None and num_bytes, "can_order() comes first"
        again = partial(self.submit, path, offset, num_bytes, buffer)
        return self._ordered.give(file, offset, address, num_bytes, again)

    def close(self) -> None:
        """Wait for all submitted reads, and end the threads."""
        for name in ("_ordered", "_queue", "_threads"):
            reads: BlockReads | OrderedReads | None = self.__dict__.pop(name, None)
            if reads is not None:
                reads.close()
        while self._files:
            os.close(self._files.popitem()[1].descriptor)

    def is_direct(self, path: Path) -> bool:
        """Whether reads of this file go past the page cache."""
        return self._open(path).is_direct

    def _open(self, path: Path) -> OpenFile:
        file = self._files.get(path)
        if file is not None:
            return file
        try:
            with self._lock:  # several threads submit
                return self._files.get(path) or self._opened(path)
        except OSError as error:
            raise unreadable(path, error) from error

    def _opened(self, path: Path) -> OpenFile:
        """With the lock held: open a file. Raises OSError and CorruptFile."""
        descriptor, is_direct = _open_direct(path, self._direct_devices)
        can_queue = is_direct and is_queued(descriptor)
        identity = FileIdentity.of(os.fstat(descriptor))
        self._files[path] = OpenFile(path, descriptor, is_direct, can_queue, self._known.get(path, identity))
        self._files[path].check()
        return self._files[path]

    def _reads_of(self, file: OpenFile) -> BlockReads:
        with self._lock:
            if file.is_queued and self._preadv is None:
                try:
                    return self._queue
                except OSError as error:  # the system has no queue to spare
                    logger.debug("reads are not queued: %s", error)
            return self._threads


def _checked_address(offset: int, num_bytes: int, buffer: Tensor) -> int:
    """Where the buffer begins. Raises ValueError if it or the range is not in whole pages."""
    address, room = buffer.data_ptr(), buffer.numel()
    if offset % PAGE or address % PAGE or room < round_up(num_bytes):
        raise ValueError(f"offset {offset} or the buffer of {room} bytes is not in whole pages")
    return address


def _open_direct(path: Path, devices: set[int]) -> tuple[int, bool]:
    """A file descriptor, and whether its reads bypass the page cache. A read is tried with the first file of
    a device, which is added to `devices`: a trial would wait behind reads that are under way. Raises
    OSError, and CorruptFile for what is no ordinary file."""
    try:
        descriptor, _ = patiently(open_ordinary, path, os.O_DIRECT)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EACCES):
            raise
    else:
        device = os.fstat(descriptor).st_dev
        if device in devices:
            return descriptor, True
        page = mmap.mmap(-1, PAGE)
        try:
            patiently(os.preadv, descriptor, [page], 0)
        except OSError:  # O_DIRECT was accepted when the file was opened, and is refused now
            os.close(descriptor)
        else:
            devices.add(device)
            return descriptor, True
        finally:
            page.close()
    logger.warning(
        "%s is on a file system without direct reads: it is read through the page cache, which is slower",
        path,
    )
    return patiently(open_ordinary, path)[0], False
