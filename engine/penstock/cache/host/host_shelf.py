"""HostShelf: blocks of a card's KV cache in the host's memory, found by key. What a Shelf is on disk.

Any thread may look and read; one thread adds at a time, and blocks on their way from disk to the card may be
added beside it. A slot has a version, which changes when the slot is given to another block: a thread that
copies out of a slot looks at the version before and after."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from penstock.cache.disk.block_order import OrderedBlocks
from penstock.cache.disk.record import Record
from penstock.memory.direct_io import aligned_buffer

#: (slot, key, parent, whether the slot still has this block) of a block that was added.
Tell = Callable[[int, bytes, bytes, Callable[[], bool]], None]


class HostShelf(OrderedBlocks):
    """As many blocks of `extent_bytes` as `limit_bytes` have room for. What was used least recently gives
    way."""

    folder = "the host's memory"
    is_writer = True
    #: Bytes of other models.
    others_bytes = 0

    def __init__(self, limit_bytes: int, extent_bytes: int) -> None:
        """Takes all its memory at once."""
        super().__init__()
        num_slots = limit_bytes // extent_bytes
        self.limit_bytes = num_slots * extent_bytes
        self.extent_bytes = extent_bytes
        #: Is told of each block that was added.
        self.tell: Tell = _tell_nobody
        self._slots = aligned_buffer(self.limit_bytes).view(num_slots, extent_bytes)
        self._free = list(reversed(range(num_slots)))
        self._versions = [0] * num_slots
        self._lock = threading.Lock()

    def make_room(self, shelf: object, num_bytes: int) -> bool:
        """add() makes its own room."""
        return bool(len(self._versions))

    def read(self, key: bytes, buffer: memoryview) -> bool | None:
        """Fill the buffer with a block's bytes; None if there is no such block any more."""
        with self._lock:
            record = self._order.find(key)
            version = self._versions[record.slot] if record is not None else 0
        if record is None:
            return None
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(self._slots[record.slot])
        return True if self._versions[record.slot] == version else None

    def parent_of(self, key: bytes) -> bytes | None:
        with self._lock:
            record = self._order.find(key)
        return None if record is None else record.parent

    def use(self, keys: list[bytes]) -> None:
        """These blocks, in the order of their text, were used now."""
        with self._lock:
            for key in reversed(keys):
                self._order.use(key, time.time())

    def add(self, key: bytes, parent: bytes, content: memoryview) -> None:
        """Keep a block of extent_bytes, in the place of another one if there is no room."""
        with self._lock:
            if key in self._order:
                return
            if not self._free and not self._evict():
                return
            slot = self._free.pop()
        self._slots[slot].copy_(torch.frombuffer(content, dtype=torch.uint8))
        with self._lock:
            if key in self._order:  # it came from disk at the same time
                self._free.append(slot)
                return
            self._order.add(Record(key, parent, 0, time.time(), slot))
            version = self._versions[slot]
        self.tell(slot, key, parent, lambda: self._versions[slot] == version)

    def read_block(self, slot: int, out: Tensor) -> None:
        """Copy a slot into `out` (uint8 [extent_bytes]), for who was told of it."""
        out.copy_(self._slots[slot])

    def close(self) -> None:
        """The disk may still write what it was told of; the memory is free when nobody has the shelf."""
        self.tell = _tell_nobody

    def _evict(self) -> bool:
        """Free the slot of the block that gives way next; for who holds the lock."""
        record = self._order.next_out
        if record is None:
            return False
        self._order.remove(record.key)
        self._versions[record.slot] += 1
        self._free.append(record.slot)
        return True


def _tell_nobody(slot: int, key: bytes, parent: bytes, is_unchanged: Callable[[], bool]) -> None:
    """No tier is below."""
