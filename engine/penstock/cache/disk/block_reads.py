"""BlockReads: threads that bring blocks from a shelf into blocks of the KV cache.

A block is read into memory of the thread, checked, and copied only then. So a read that hangs holds no block
of the cache: a request that waits for it may end it at any time.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from penstock.cache.disk.block_shelf import BlockShelf, Tier
from penstock.cache.kv_cache import BlockCache
from penstock.errors import CorruptFile
from penstock.memory.pages import round_up
from penstock.metrics import KVDiskStats

logger = logging.getLogger(__name__)

#: Blocks that are read at a time. Checking a block takes as long as reading it from a fast disk.
NUM_THREADS = 3
#: How much the last reading counts in the rate of all readings.
NEWEST_SHARE = 0.3


class BlockRead:
    """Blocks of one sequence on their way. is_done and end() are for one thread."""

    def __init__(self, num_blocks: int, limit_s: float, notify: Callable[[], None], tier: str = "") -> None:
        self._left = num_blocks
        self._tier = tier
        self._notify = notify
        self._changed = threading.Condition()
        self._is_ended = False
        self._num_copying = 0
        self._arrived = set[bytes]()
        self.began_s = time.monotonic()
        self._until_s = self.began_s + limit_s
        self.ended_s = math.inf

    @property
    def is_done(self) -> bool:
        """All blocks have arrived or were found to be damaged, or this takes longer than it may."""
        return self._left == 0 or time.monotonic() >= self._until_s

    def end(self) -> set[bytes]:
        """The keys of the blocks that have arrived. No other block is written from now on."""
        with self._changed:
            self._is_ended = True
            self._changed.wait_for(lambda: self._num_copying == 0)
            return self._arrived

    @property
    def by_tier(self) -> dict[str, tuple[Set[bytes], float]]:
        """The tier, the keys of the blocks that have arrived from there, and elapsed_s."""
        return {self._tier: (self._arrived, self.elapsed_s)}

    @property
    def elapsed_s(self) -> float:
        """Until all blocks were there, or until now."""
        return min(self.ended_s, time.monotonic()) - self.began_s

    def begin_copy(self) -> bool:
        """A thread is about to write into a block. False: nobody wants the block any more."""
        with self._changed:
            self._num_copying += not self._is_ended
            return not self._is_ended

    def end_copy(self, key: bytes | None) -> None:
        """The thread has written a block; None: it could not."""
        with self._changed:
            self._num_copying -= 1
            if key is not None:
                self._arrived.add(key)
            self._changed.notify_all()

    def leave(self) -> None:
        """A block has arrived, or will never."""
        with self._changed:
            self._left -= 1
            if not self._left:
                self.ended_s = time.monotonic()
        self._notify()


class BlockReads:
    """The reading threads of a shelf."""

    def __init__(
        self,
        cache: BlockCache,
        stats: KVDiskStats,
        tier: Tier,
        num_threads: int = NUM_THREADS,
    ) -> None:
        self._tier, self._changed = tier, tier.changed
        self._cache = cache
        self._stats = stats
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="penstock-kv-read")
        self._buffers = queue.SimpleQueue[Tensor]()
        for _ in range(num_threads):
            self._buffers.put(tier.make_buffer(round_up(cache.block_bytes)))
        self._rate = tier.usual_rate

    def expected_s(self, num_blocks: int) -> float:
        """What reading so many blocks should take."""
        return num_blocks * self._cache.block_bytes / self._rate

    def begin(self, shelf: BlockShelf, wanted: list[tuple[bytes, int]], limit_s: float) -> BlockRead:
        """Read blocks: (key, number of the cache's block) pairs in the order of their text."""
        read = BlockRead(len(wanted), limit_s, self.tell, self._tier.name)
        for key, block in wanted:
            self._threads.submit(self._read, read, shelf, key, block)
        self._threads.submit(self._note, read, shelf, [key for key, _ in wanted])
        return read

    def wait(self, timeout_s: float) -> None:
        """Until a block has arrived, or the time is up."""
        with self._changed:
            self._changed.wait(timeout_s)

    def close(self) -> None:
        """Ends when the reads in flight have ended."""
        self._threads.shutdown(cancel_futures=True)

    def tell(self) -> None:
        """Whoever waits looks again."""
        with self._changed:
            self._changed.notify_all()

    def _read(self, read: BlockRead, shelf: BlockShelf, key: bytes, block: int) -> None:
        buffer = self._buffers.get()
        try:
            is_whole = shelf.read(key, memoryview(buffer.numpy().data))
            if is_whole is False:
                self._stats.corrupt_blocks += 1
                logger.warning(
                    "a block in %s is damaged: the tokens that it is of are computed again", shelf.folder
                )
            above = self._tier.above
            if is_whole and above is not None and (parent := shelf.parent_of(key)) is not None:
                above.add(key, parent, memoryview(buffer.numpy().data))
            self._stats.read_bytes += shelf.extent_bytes if is_whole else 0
            if is_whole and read.begin_copy():
                written: bytes | None = None
                try:
                    self._cache.write_block(block, buffer)
                    written = key
                except CorruptFile as error:  # a cache with blocks in a file, whose disk fails
                    logger.warning("a block that --kv-disk has kept is computed again: %s", error)
                finally:
                    read.end_copy(written)
        finally:
            self._buffers.put(buffer)
            read.leave()

    def _note(self, read: BlockRead, shelf: BlockShelf, keys: list[bytes]) -> None:
        """The reading is at its end, or nearly: other threads may have its last blocks in hand."""
        elapsed_s = read.elapsed_s
        if elapsed_s > 0:
            newest = len(keys) * self._cache.block_bytes / elapsed_s
            self._rate += NEWEST_SHARE * (newest - self._rate)
        shelf.use(keys)
