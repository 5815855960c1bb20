"""DirectReader: ranges of files straight into memory, past the page cache, several reads in flight.

O_DIRECT makes the memory budget real (the kernel keeps no second copy) and is faster than the page cache
for what is read once per sweep. It wants addresses, offsets and lengths that are multiples of the disk's
block; a page is enough everywhere. One read at a time leaves most of a disk's rate unused, so each range
is cut into blocks that a few threads read; blocks are served in the order in which ranges were submitted,
and those of the next range begin while the last ones are still in flight.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from penstock.errors import CorruptFile
from penstock.memory.pages import PAGE, round_up

logger = logging.getLogger(__name__)

#: What is used without a trial on the disk at hand.
DEFAULT_BLOCK_BYTES, DEFAULT_DEPTH = 4 << 20, 4

#: Linux' number, which Python does not name; pages that are asked for at a time.
MADV_POPULATE_WRITE, POPULATED_BYTES = 23, 4 << 20

Preadv = Callable[[int, Sequence[memoryview], int], int]


def aligned_buffer(num_bytes: int) -> Tensor:
    """uint8 [num_bytes, rounded up to whole pages], zeroed, on a page boundary; given back to the system
    when the tensor dies. In huge pages where the system has them: fewer faults and address look-ups."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, round_up(num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them
            logger.debug("no huge pages")
    return torch.frombuffer(pages, dtype=torch.uint8)


class PopulatedAhead:
    """A thread that has the system find (and clear) the pages of a buffer, from its start on, while they are
    read into. A read that meets pages which are not there yet waits for them with the disk idle: of 10 GB
    into fresh memory on two cores that was a third of the time."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="penstock-pages", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until all pages are there."""
        self._thread.join()

    def close(self) -> None:
        """Ask for no more of them."""
        self._is_stopped = True
        self._thread.join()

    def _run(self) -> None:
        start, end = self._buffer.data_ptr(), self._buffer.data_ptr() + self._buffer.numel()
        madvise = ctypes.CDLL(None).madvise  # mmap's own would keep the interpreter waiting
        for at in range(start, end, POPULATED_BYTES):
            num_bytes = ctypes.c_size_t(min(POPULATED_BYTES, end - at))
            if self._is_stopped or madvise(ctypes.c_void_p(at), num_bytes, MADV_POPULATE_WRITE):
                break  # a kernel before 5.14: pages come as they are needed


@dataclass(frozen=True)
class _File:
    path: Path
    descriptor: int
    is_direct: bool
    size: int
    modified_ns: int


@dataclass
class _Range:
    """One submitted read; done when no block is left."""

    file: _File
    future: Future[int]
    num_bytes: int
    num_blocks: int = 0
    error: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def finish_block(self, error: BaseException | None) -> None:
        with self.lock:
            self.error = self.error or error
            self.num_blocks -= 1
            is_last = self.num_blocks == 0
        if is_last and self.error is not None:
            self.future.set_exception(self.error)
        elif is_last:
            self.future.set_result(self.num_bytes)


@dataclass(frozen=True)
class _Block:
    range: _Range
    view: memoryview
    offset: int
    num_bytes: int


class DirectReader:
    """A few threads that read. Close it, or use `with`."""

    def __init__(
        self,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        depth: int = DEFAULT_DEPTH,
        preadv: Preadv = os.preadv,
    ) -> None:
        """`depth` reads of `block_bytes` (whole pages) are in flight at a time."""
        if block_bytes <= 0 or block_bytes % PAGE or depth < 1:
            raise ValueError(f"block_bytes {block_bytes} must be whole pages, depth {depth} at least 1")
        self._block_bytes = block_bytes
        self._preadv = preadv
        self._files: dict[Path, _File] = {}
        self._lock = threading.Lock()
        self._blocks: SimpleQueue[_Block | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"penstock-disk-{index}", daemon=True)
            for index in range(depth)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> DirectReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def submit(self, path: Path, offset: int, num_bytes: int, buffer: Tensor) -> Future[int]:
        """Read `num_bytes` from `offset` (a page boundary) on into `buffer` (page aligned, with room for
        num_bytes rounded up to whole pages, of which the last may be overwritten with anything).

        The result is num_bytes. Raises CorruptFile (there or here) if the file ends early, can't be read,
        or was changed since it was read first.
        """
        if offset % PAGE or buffer.data_ptr() % PAGE or buffer.numel() < round_up(num_bytes):
            raise ValueError(f"offset {offset} or buffer of {buffer.numel()} is not in whole pages")
        whole = _Range(self._open(path), Future(), num_bytes)
        view = memoryview(buffer.numpy().data).cast("B")
        starts = range(0, num_bytes, self._block_bytes)
        whole.num_blocks = len(starts)
        if not starts:
            whole.future.set_result(0)
        for start in starts:
            length = min(self._block_bytes, num_bytes - start)
            part = view[start : start + round_up(length)]
            self._blocks.put(_Block(whole, part, offset + start, length))
        return whole.future

    def close(self) -> None:
        """Wait for everything that was submitted, and end the threads."""
        for _ in self._threads:
            self._blocks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        while self._files:
            os.close(self._files.popitem()[1].descriptor)

    def is_direct(self, path: Path) -> bool:
        """Whether reads of this file go past the page cache."""
        return self._open(path).is_direct

    def _open(self, path: Path) -> _File:
        try:
            with self._lock:  # several threads submit
                file = self._files.get(path)
                if file is None:
                    descriptor, is_direct = _open_direct(path)
                    status = os.fstat(descriptor)
                    file = _File(path, descriptor, is_direct, status.st_size, status.st_mtime_ns)
                    self._files[path] = file
            status = os.fstat(file.descriptor)
        except OSError as error:
            raise CorruptFile(f"{path} can't be read: {error.strerror}") from error
        if (status.st_size, status.st_mtime_ns) != (file.size, file.modified_ns):
            raise CorruptFile(
                f"{path} was changed while it was in use, so its weights may not be the model's any more; "
                "put the model back and start again"
            )
        return file

    def _serve(self) -> None:
        while (block := self._blocks.get()) is not None:
            error: BaseException | None = None
            try:
                if block.range.error is None:
                    self._read(block)
            except BaseException as caught:  # whatever it is, whoever waits has to learn of it
                error = caught
            block.range.finish_block(error)

    def _read(self, block: _Block) -> None:
        file, done = block.range.file, 0
        while done < block.num_bytes:
            try:
                count = self._preadv(file.descriptor, [block.view[done:]], block.offset + done)
            except OSError as error:
                raise CorruptFile(
                    f"reading at {block.offset} of {file.path} failed: {error.strerror}"
                ) from error
            end = done + count
            # After a part, direct reads go on from a page boundary.
            start = end if end >= block.num_bytes else end // PAGE * PAGE
            if start <= done:
                raise CorruptFile(
                    f"{file.path} ends at {block.offset + end}, within a layer; it was cut after it was "
                    "opened: copy or download it again"
                )
            done = start
        if not file.is_direct:  # leave no second copy
            os.posix_fadvise(file.descriptor, block.offset, block.num_bytes, os.POSIX_FADV_DONTNEED)


def _open_direct(path: Path) -> tuple[int, bool]:
    """A descriptor, and whether it bypasses the page cache. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EACCES):
            raise
    else:
        page = mmap.mmap(-1, PAGE)
        try:
            os.preadv(descriptor, [page], 0)
        except OSError:  # accepted when opened, refused when read
            os.close(descriptor)
        else:
            return descriptor, True
        finally:
            page.close()
    logger.warning("%s is on a file system without direct reads: through the page cache, slower", path)
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
