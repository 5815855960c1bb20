"""SpillFile: a temporary file that is read past the page cache, several reads at a time. The file has no
name: it is gone when the process ends, however the process ends."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from penstock.errors import ConfigError, CorruptFile
from penstock.memory.direct_io import DEFAULT_BLOCK_BYTES, DEFAULT_DEPTH
from penstock.memory.pages import PAGE
from penstock.memory.reads.block_reads import Block, OpenFile, QueuedBlocks, Range, ThreadedBlocks
from penstock.memory.reads.patient import patiently
from penstock.memory.reads.queued_reads import is_queued

logger = logging.getLogger(__name__)

#: A place of the file, and the memory (uint8, contiguous) that is read or written there. Both lie on page
#: boundaries and have whole pages.
Place = tuple[int, Tensor]


class SpillFile:
    """Any thread may read and write; a caller that reads and writes the same bytes puts the two in order.
    Close the file."""

    def __init__(
        self,
        folder: Path,
        num_bytes: int,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        depth: int = DEFAULT_DEPTH,
    ) -> None:
        """Takes `num_bytes` of the disk at once, so that no write fails later because the disk is full.
        Raises ConfigError if the folder can't be used, or has too little room. `depth` reads of
        `block_bytes` are in flight at a time."""
        self.folder = folder
        self._block_bytes = block_bytes
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, is_direct = _unnamed(folder)
        except OSError as error:
            raise ConfigError(f"--kv-spill: {folder} can't be used: {error.strerror}") from error
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(
                f"--kv-spill: {folder} has no room for {num_bytes} bytes: {error.strerror}. Name a folder on "
                "another disk, or lower --max-model-len"
            ) from error
        self._reads = _reads(depth) if is_direct and is_queued(descriptor) else ThreadedBlocks(depth)
        is_in_queue = not isinstance(self._reads, ThreadedBlocks)
        #: Moves blocks between slots and file during a sweep.
        self.thread = ThreadPoolExecutor(1, "penstock-kv-spill")
        self._file = OpenFile(folder, descriptor, is_direct, is_in_queue)

    def begin_read(self, places: Iterable[Place]) -> list[Future[int]]:
        """Futures, which raise CorruptFile where the disk can't be read."""
        return [self._begin_read(*place) for place in places]

    def _begin_read(self, offset: int, target: Tensor) -> Future[int]:
        num_bytes = target.numel()
        whole = Range(self._file, Future(), num_bytes)
        starts, address = range(0, num_bytes, self._block_bytes), target.data_ptr()
        whole.num_blocks = len(starts)
        blocks = []
        for start in starts:
            length = min(self._block_bytes, num_bytes - start)
            blocks.append(Block(whole, target, start, address + start, offset + start, length))
        self._reads.put(blocks)
        return whole.future

    def write(self, places: Sequence[Place]) -> None:
        """Returns when all is written. Raises CorruptFile."""
        for offset, source in places:
            left = memoryview(source.numpy().data).cast("B")
            while left:
                try:
                    count = patiently(os.pwrite, self._file.descriptor, left, offset)
                except OSError as error:
                    raise CorruptFile(
                        f"keys and values can't be written to {self.folder} (--kv-spill): {error.strerror}"
                    ) from error
                left, offset = left[count:], offset + count

    def close(self) -> None:
        """Wait for all reads."""
        self.thread.shutdown()
        self._reads.close()
        os.close(self._file.descriptor)


def _reads(depth: int) -> QueuedBlocks | ThreadedBlocks:
    """Queued, unless the system has no queue to spare (fs.aio-max-nr)."""
    try:
        return QueuedBlocks(depth)
    except OSError as error:
        logger.debug("--kv-spill: reads are not queued: %s", error)
        return ThreadedBlocks(depth)


def _unnamed(folder: Path) -> tuple[int, bool]:
    """A descriptor of a new file without a name, and whether it goes past the page cache. Raises OSError."""
    descriptor, name = tempfile.mkstemp(prefix="penstock-kv-", dir=folder)
    try:
        with contextlib.suppress(OSError), mmap.mmap(-1, PAGE) as page:
            direct = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            try:
                if os.pwrite(direct, page, 0) != PAGE:
                    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            except OSError:  # O_DIRECT was accepted when the file was opened, and is refused now
                os.close(direct)
                raise
            os.close(descriptor)
            return direct, True
    finally:
        os.unlink(name)
    logger.warning("--kv-spill: %s is on a file system without direct reads, which is slower", folder)
    return descriptor, False
