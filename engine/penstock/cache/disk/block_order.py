"""BlockOrder: which of the blocks on disk gives way next. Numbers only.

A block can be used only with all blocks before it in its text. So a block gives way before those in front of
it: the least recently used of the blocks that no other block on disk goes on from.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from penstock.cache.disk.record import Record


class BlockOrder:
    """The records of a shelf, by key."""

    def __init__(self, found: Iterable[Record] = ()) -> None:
        """Of two records with one key the one that was used later counts."""
        by_use = sorted(found, key=lambda record: record.last_used_s)
        self._records = {record.key: record for record in by_use}
        #: How many blocks go on from a block.
        self._num_children = Counter(record.parent for record in self._records.values())
        #: Blocks that no other goes on from; the next to give way comes first.
        self._leaves = OrderedDict.fromkeys(
            record.key for record in by_use if record.key not in self._num_children
        )

    def __contains__(self, key: object) -> bool:
        return key in self._records

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        yield from self._records.values()

    def find(self, key: bytes) -> Record | None:
        return self._records.get(key)

    def add(self, record: Record) -> None:
        """A block that was not there."""
        self._records[record.key] = record
        self._num_children[record.parent] += 1
        self._leaves.pop(record.parent, None)
        if record.key not in self._num_children:
            self._leaves[record.key] = None

    def remove(self, key: bytes) -> Record:
        """The block is not there any more."""
        record = self._records.pop(key)
        self._leaves.pop(key, None)
        self._num_children[record.parent] -= 1
        if self._num_children[record.parent]:
            return record
        del self._num_children[record.parent]
        parent = self._records.get(record.parent)
        if parent is not None:
            self._leaves[parent.key] = None
            self._leaves.move_to_end(parent.key, last=parent.last_used_s > record.last_used_s)
        return record

    def use(self, key: bytes, now_s: float) -> Record | None:
        """The block is used at this time. Returns what was known of it before."""
        record = self._records.get(key)
        if record is not None:
            self._records[key] = record._replace(last_used_s=now_s)
            if key in self._leaves:
                self._leaves.move_to_end(key)
        return record

    @property
    def next_out(self) -> Record | None:
        """The block that gives way next; None if there are no blocks."""
        return self._records[next(iter(self._leaves))] if self._leaves else None


class OrderedBlocks:
    """What shelves have in common: which blocks there are, and what they take."""

    #: Bytes of each block.
    extent_bytes: int

    def __init__(self) -> None:
        self._order = BlockOrder()

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)

    @property
    def num_bytes(self) -> int:
        """What the blocks take."""
        return len(self._order) * self.extent_bytes
