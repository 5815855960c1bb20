"""KVStore: blocks of the KV cache that outlive it: written after, and read ahead.

A thread writes each block soon after its tokens were computed, from where the block lies in the cache. It
notes the block's version before it copies, and looks again afterwards: a block that was taken for other
tokens meanwhile is not kept. No step waits for the thread, and blocks that are taken before their turn comes
are not written. Blocks of a sequence that has to give way are written before all others: write()."""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

from penstock.cache.disk.block_offers import BlockOffers, BlockWrite, Offer
from penstock.cache.disk.block_reads import NEWEST_SHARE, NUM_THREADS, BlockRead, BlockReads
from penstock.cache.disk.block_shelf import BlockShelf, Room, Tier
from penstock.cache.disk.record import NO_KEY
from penstock.cache.disk.state_pieces import StatePieces
from penstock.cache.kv_cache import BlockCache
from penstock.errors import CorruptFile
from penstock.memory.pages import round_up
from penstock.metrics import KVDiskStats

logger = logging.getLogger(__name__)

Of = TypeVar("Of", bound=BlockShelf)

#: Blocks of host memory that a store takes: one for each thread that reads, and one for the thread that
#: writes.
NUM_BUFFERS = NUM_THREADS + 1
#: After an error of the disk, nothing is written for so many seconds; after a full disk, other blocks
#: give way to each new one for so long.
PAUSE_S = 30.0
#: Seconds in which a server that ends writes what is left.
CLOSE_S = 10.0
#: How much less urgent writing is than computing.
NICENESS = 10
#: What a disk says that has no room.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class KVStore(Generic[Of]):
    """Writes, finds and reads the blocks of one model. Close the store."""

    def __init__(
        self,
        folder: Room[Of],
        cache: BlockCache,
        open_shelf: Callable[[Callable[[], bool]], Of],
        is_quick: bool,
        rate: float,
        tier: Tier,
    ) -> None:
        """`open_shelf` may take long, unless `is_quick`: then it is called on the thread that writes, and
        nothing is found before. It asks the function that it gets whether the store is still wanted, and
        raises something soon after the answer is no. `rate`: bytes a second that are written while the engine
        works. Raises what a quick open_shelf() raises."""
        self.stats = KVDiskStats(limit_bytes=folder.limit_bytes)
        #: By which numbers recurrent states can be offered and read; None: the cache has none.
        self.pieces = cache.numbers if isinstance(cache, StatePieces) else None
        self.is_idle: Callable[[], bool] = lambda: False
        self._folder = folder
        self._cache = cache
        self._open_shelf = open_shelf
        self._rate = rate
        self._shelf: Of | None = open_shelf(lambda: True) if is_quick else None
        self._opened = threading.Event()
        self.tier = tier
        self._reads = BlockReads(cache, self.stats, tier)
        self._buffer = tier.make_buffer(round_up(cache.block_bytes))
        self._offers = BlockOffers()
        self._changed = self._offers.changed
        #: Bytes a second at which blocks were written lately, without the rests.
        self._write_rate = tier.usual_rate
        self._closes_at_s: float | None = None
        self._pause_until_s = 0.0
        #: The limit that was asked for. The folder's is lower while the disk is full.
        self._asked_bytes = folder.limit_bytes
        self._full_until_s = 0.0
        self._thread = threading.Thread(target=self._run, name="penstock-kv-write", daemon=True)
        self._thread.start()

    def __contains__(self, key: object) -> bool:
        return self._shelf is not None and key in self._shelf

    def offer(self, block: int, key: bytes, parent: bytes, is_unchanged: Callable[[], bool]) -> None:
        """This block of the cache is computed, and may be written. Never blocks."""
        if key in self:
            return
        self._offers.put(block, Offer(key, parent, is_unchanged))

    @property
    def can_write(self) -> bool:
        """Whether blocks are written now."""
        return self._shelf is not None and self._shelf.is_writer and time.monotonic() >= self._pause_until_s

    def expected_write_s(self, num_blocks: int) -> float:
        """What writing so many blocks should take, before all others."""
        return num_blocks * self._cache.block_bytes / self._write_rate

    def write(
        self, offers: Sequence[tuple[int, bytes, bytes, Callable[[], bool]]], limit_s: float
    ) -> BlockWrite:
        """Begin to write blocks before all others: the arguments of offer() for each."""
        wanted = [(block, Offer(key, parent, is_unchanged)) for block, key, parent, is_unchanged in offers]
        return self._offers.hurry(wanted, limit_s)

    def expected_read_s(self, keys: Collection[bytes]) -> float:
        """What reading these blocks should take."""
        return self._reads.expected_s(len(keys))

    def read(self, wanted: list[tuple[bytes, int]], limit_s: float) -> BlockRead:
        """Begin to read blocks that were found: (key, number of a block of the cache) pairs in the order of
        their text. Nobody else may use these blocks until BlockRead.end()."""
        assert self._shelf is not None, "nothing is found in a shelf that is not open"
        return self._reads.begin(self._shelf, wanted, limit_s)

    def wait(self, timeout_s: float = 0.05) -> None:
        """Until a block was read, or a block was written that somebody waits for, or the time is up."""
        self._reads.wait(timeout_s)

    def wait_until_open(self) -> None:
        """Until blocks can be found, or never will be."""
        self._opened.wait()

    def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until all offers were written. For tests and scripts."""
        until_s = time.monotonic() + timeout_s
        while self._offers and time.monotonic() < until_s:
            time.sleep(0.005)

    def close(self) -> None:
        """Write what is left, within CLOSE_S, and end the threads."""
        with self._changed:
            self._closes_at_s = time.monotonic() + CLOSE_S
            self._changed.notify()
        self._thread.join()
        self._reads.close()
        self.is_idle = lambda: False  # without the engine in it, whose memory is free then at once
        if self._shelf is not None:
            self._shelf.close()

    def _run(self) -> None:
        if sys.platform == "linux":  # elsewhere the call would be for the whole process
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + NICENESS)
        try:
            if self._shelf is None:
                self._shelf = self._open_shelf(lambda: self._closes_at_s is None)
        except Exception as error:
            logger.warning("keys and values are not kept on disk: %s", error)
            return
        finally:
            self._opened.set()
        self._greet(self._shelf)
        while (found := self._next()) is not None:
            self._write(self._shelf, *found)

    def _greet(self, shelf: Of) -> None:
        self._tell_of(shelf)
        logger.info("keys and values: %d blocks of this model in %s", len(shelf), shelf.folder)
        if not shelf.is_writer:
            logger.warning(
                "--kv-disk: another process writes to %s, so this one only reads what is there now; give it "
                "a folder of its own if it shall write, too",
                shelf.folder,
            )

    def _next(self) -> tuple[int, Offer] | None:
        """The oldest offer; None if the thread has to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._offers or self._closes_at_s is not None)
            if self._closes_at_s is not None and time.monotonic() > self._closes_at_s:
                return None
            return self._offers.first()

    def _write(self, shelf: Of, block: int, offer: Offer) -> None:
        began_s = time.monotonic()
        is_written = False
        if began_s >= self._full_until_s:  # there may be room again
            self._folder.limit_bytes = self._asked_bytes
        if shelf.is_writer and began_s >= self._pause_until_s and offer.key not in shelf:
            is_written = self._copy(block, offer) and self._add(shelf, offer)
        busy_s = time.monotonic() - began_s
        if is_written and busy_s > 0:
            self._write_rate += NEWEST_SHARE * (self._cache.block_bytes / busy_s - self._write_rate)
        self._tell_of(shelf)
        if self._offers.remove(block, offer):
            self._reads.tell()
        elif is_written:
            self._rest(busy_s)

    def _copy(self, block: int, offer: Offer) -> bool:
        """Copy a block into the thread's memory. False if the block was taken meanwhile, or can't be read
        from the file of a cache that has blocks there."""
        is_read = offer.is_unchanged()
        try:
            if is_read:
                self._cache.read_block(block, self._buffer)
        except CorruptFile as error:
            logger.warning("--kv-disk: a block can't be kept: %s", error)
            is_read = False
        if not is_read or not offer.is_unchanged():
            self.stats.missed_blocks += 1
            return False
        return True

    def _add(self, shelf: Of, offer: Offer) -> bool:
        """Write the thread's memory as a block. Errors cost the block, and nothing else."""
        content = memoryview(self._buffer.numpy().data)
        try:
            if not self._folder.make_room(shelf, shelf.extent_bytes):
                return False
            shelf.add(offer.key, offer.parent or NO_KEY, content)
        except OSError as error:
            self._suffer(shelf, error)
            return False
        self.stats.written_blocks += 1
        self.stats.written_bytes += len(content)
        return True

    def _suffer(self, shelf: Of, error: OSError) -> None:
        """A disk without room keeps what it has, and other blocks take their places, until the disk is asked
        once more."""
        if not self.stats.failed_writes:
            logger.warning("--kv-disk: a block can't be written to %s: %s", shelf.folder, error.strerror)
        self.stats.failed_writes += 1
        if error.errno in _FULL and len(shelf):
            self._folder.limit_bytes = min(self._asked_bytes, shelf.num_bytes + self._folder.others_bytes)
            self._full_until_s = time.monotonic() + PAUSE_S
        else:
            self._pause_until_s = time.monotonic() + PAUSE_S

    def _rest(self, busy_s: float) -> None:
        """Keep to the rate while the engine works: the disk and the processor are its own then."""
        rest_s = self._cache.block_bytes / self._rate - busy_s
        with self._changed:
            if rest_s > 0:
                self._changed.wait_for(self._is_needed, rest_s)

    def _is_needed(self) -> bool:
        """Whether the thread has to go on at once."""
        return self._closes_at_s is not None or self._offers.is_urgent or self.is_idle()

    def _tell_of(self, shelf: Of) -> None:
        self.stats.is_writer = shelf.is_writer
        self.stats.num_blocks, self.stats.num_bytes = len(shelf), shelf.num_bytes
        self.stats.limit_bytes = self._folder.limit_bytes
