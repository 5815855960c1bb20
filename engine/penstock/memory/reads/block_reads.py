"""Blocks of files on their way into memory, a few at a time: by threads that read, or by reads that the
system queues (queued_reads.py). Either way blocks begin in the order in which they came."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from torch import Tensor

from penstock.errors import CorruptFile
from penstock.memory.ordinary_file import FileIdentity, unreadable
from penstock.memory.pages import PAGE, round_up
from penstock.memory.reads.patient import patiently
from penstock.memory.reads.queued_reads import QueuedRead, QueuedReads

logger = logging.getLogger(__name__)

Preadv = Callable[[int, Sequence[memoryview], int], int]


@dataclass(frozen=True)
class OpenFile:
    path: Path
    descriptor: int
    is_direct: bool
    is_queued: bool  # the system queues reads of the file
    #: What the file has to be still when it was read; None for a file that we write.
    identity: FileIdentity | None = None

    def check(self) -> None:
        """Raises CorruptFile if the file was changed since it was opened."""
        if self.identity is None:
            return
        try:
            now = FileIdentity.of(os.fstat(self.descriptor))
        except OSError as error:
            raise unreadable(self.path, error) from error
        self.identity.check(self.path, now)


def change_of(file: OpenFile) -> CorruptFile | None:
    """The error for a file that was changed while it was read."""
    try:
        file.check()
    except CorruptFile as error:
        return error
    return None


@dataclass
class Range:
    """One submitted read, which is done when no block is left."""

    file: OpenFile
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
        if is_last and self.error is None:
            self.error = change_of(self.file)
        if is_last and self.error is not None:
            self.future.set_exception(self.error)
        elif is_last:
            self.future.set_result(self.num_bytes)


@dataclass
class Block:
    range: Range
    buffer: Tensor
    first: int  # byte of the buffer
    address: int  # of that byte
    offset: int
    num_bytes: int
    #: Bytes that are there, or whole pages of them.
    done: int = 0

    @property
    def num_room_bytes(self) -> int:
        """Bytes of the buffer that a read may fill: whole pages."""
        return round_up(self.num_bytes)

    @cached_property
    def view(self) -> memoryview:
        """The part of the buffer that a read may fill. Queued reads need the address alone."""
        view = memoryview(self.buffer.numpy().data).cast("B")
        return view[self.first : self.first + self.num_room_bytes]

    def advance(self, count: int) -> bool:
        """`count` more bytes have come. Returns whether all are there. Raises CorruptFile if the file ends
        before."""
        end = self.done + count
        # A read may bring a part only. Direct reads then go on from a page boundary.
        start = end if end >= self.num_bytes else end // PAGE * PAGE
        if start <= self.done:
            raise CorruptFile(
                f"{self.range.file.path} ends at {self.offset + end}, within a layer: the file was cut after "
                "it was opened. Copy or download the file again"
            )
        self.done = start
        return start >= self.num_bytes

    def read(self, preadv: Preadv) -> BaseException | None:
        """Read the rest here and now. Returns the error."""
        file = self.range.file
        try:
            while self.range.error is None:
                try:
                    count = patiently(
                        preadv, file.descriptor, [self.view[self.done :]], self.offset + self.done
                    )
                except OSError as error:
                    raise CorruptFile(
                        f"reading at byte {self.offset} of {file.path} failed: {error.strerror}"
                    ) from error
                if self.advance(count):
                    break
            if not file.is_direct:  # leave no second copy in the page cache
                os.posix_fadvise(file.descriptor, self.offset, self.num_bytes, os.POSIX_FADV_DONTNEED)
        except BaseException as error:  # the waiting thread has to learn of every error
            return error
        return None


class BlockReads(Protocol):
    def put(self, blocks: Sequence[Block]) -> None:
        """Read these blocks after those that came before. Their ranges learn of the ends."""

    def close(self) -> None:
        """Wait for all blocks."""


class ThreadedBlocks:
    """A few threads that read."""

    def __init__(self, depth: int, preadv: Preadv = os.preadv) -> None:
        self._preadv = preadv
        self._blocks: SimpleQueue[Block | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"penstock-disk-{index}", daemon=True)
            for index in range(depth)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._blocks.put(block)

    def close(self) -> None:
        for _ in self._threads:
            self._blocks.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (block := self._blocks.get()) is not None:
            block.range.finish_block(block.read(self._preadv))


class QueuedBlocks:
    """Reads in the system's queue. Who brings a block begins its read, if fewer than `depth` are under way; a
    thread waits for their ends, and begins the next ones."""

    def __init__(self, depth: int) -> None:
        """Raises OSError where the system has no such reads."""
        self._queue = QueuedReads(depth)
        self._depth = depth
        self._lock = threading.Lock()
        self._waiting: deque[Block] = deque()
        self._under_way: dict[int, Block] = {}
        #: Blocks that the queue has no more, and whose ranges do not know yet what became of them: they are
        #: read here, or their files are looked at.
        self._num_in_hand = 0
        self._all_done = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._serve, name="penstock-disk", daemon=True)
        self._thread.start()

    def put(self, blocks: Sequence[Block]) -> None:
        with self._lock:
            self._waiting.extend(blocks)
            refused = self._begin()
        self._read_here(refused)

    def close(self) -> None:
        with self._lock:
            self._all_done.wait_for(lambda: self._is_idle)
        # No read is under way any more, and Linux takes some 35 ms to end a queue: nobody waits for that but
        # Python at its exit, which a thread that comes back from a system call later would end with SIGABRT.
        try:
            threading.Thread(target=self._end, name="penstock-disk-end", daemon=False).start()
        except RuntimeError:  # Python is at its exit
            self._end()

    def _end(self) -> None:
        self._queue.close()
        self._thread.join()

    def _begin(self) -> list[Block]:
        """With the lock held: begin as many reads as there is room for. Returns a block that the system does
        not take."""
        room = self._depth - len(self._under_way)
        blocks = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        while blocks:
            reads = [
                QueuedRead(
                    id(block), block.range.file.descriptor, block.offset + block.done,
                    block.address + block.done, block.num_room_bytes - block.done,
                )
                for block in blocks
            ]  # fmt: skip
            try:
                number = self._queue.submit(reads)
            except OSError as error:
                logger.debug("a read was not queued: %s", error)
                refused = blocks.pop(0)
                self._num_in_hand += 1
                self._waiting.extendleft(reversed(blocks))
                return [refused]
            self._under_way |= {id(block): block for block in blocks[:number]}
            blocks = blocks[number:]
        return []

    def _read_here(self, refused: list[Block]) -> None:
        """Read what the system did not take or could not read, which also finds the reason, or that there is
        none any more."""
        while refused:
            for block in refused:
                block.range.finish_block(block.read(os.preadv))
            with self._lock:
                self._num_in_hand -= len(refused)
                refused = self._begin()
                self._tell()

    def _serve(self) -> None:
        while True:
            try:
                ends = self._queue.wait()
            except OSError:  # closed
                return
            finished: list[tuple[Block, BaseException | None]] = []
            failed = list[Block]()
            with self._lock:
                for key, result in ends:
                    block = self._under_way.pop(key)
                    if result < 0:
                        failed.append(block)
                        continue
                    error = _error_of(block, result)
                    if error is None and block.done < block.num_bytes:
                        self._waiting.appendleft(block)
                    else:
                        finished.append((block, error))
                self._num_in_hand += len(finished) + len(failed)
                refused = self._begin()
            for block, error in finished:
                block.range.finish_block(error)
            with self._lock:
                self._num_in_hand -= len(finished)
                self._tell()
            self._read_here(failed + refused)

    @property
    def _is_idle(self) -> bool:
        return not (self._waiting or self._under_way or self._num_in_hand)

    def _tell(self) -> None:
        """With the lock held: wake who closes."""
        if self._is_idle:
            self._all_done.notify_all()


def _error_of(block: Block, num_bytes: int) -> BaseException | None:
    """What became of a block by a read of so many bytes."""
    try:
        block.advance(num_bytes)
    except CorruptFile as error:
        return error
    return None
