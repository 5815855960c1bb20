"""BlockLog: which whole blocks can be found in the prefix cache, as events for routers. Numbers only.

A block is told of when its tokens were computed, or when it has come from disk. It is told of again when it
loses its key. So a reader of all events knows what a prompt would find. A prompt's
last block, which is not full, is not told of."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from itertools import chain

from penstock.generation.sequence import Sequence


@dataclass(frozen=True)
class BlocksStored:
    """Blocks that follow each other in a text can be found from now on."""

    keys: tuple[bytes, ...]
    #: The key of the block before them in the text; b"" if there is none.
    parent: bytes
    #: Of all the blocks.
    token_ids: tuple[int, ...]
    #: The adapter's name, and a number that stands for its weights.
    adapter: tuple[str, int] | None
    #: Stands for the request's cache_salt; "" for none. A subscriber need not know the salt itself.
    salt: str

    def goes_on_with(self, other: BlocksStored) -> bool:
        """Whether the other one's blocks follow in the same text."""
        return other.parent == self.keys[-1] and (other.adapter, other.salt) == (self.adapter, self.salt)


@dataclass(frozen=True)
class BlocksRemoved:
    """Blocks can't be found any more."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class AllCleared:
    """No block can be found any more."""


BlockEvent = BlocksStored | BlocksRemoved | AllCleared


class BlockLog:
    """Gathers events until somebody takes them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        #: Blocks of the step that is being decided or computed.
        self._expected: dict[int, BlocksStored] = {}
        #: The keys of blocks that were told of, by block.
        self._told: dict[int, bytes] = {}
        #: One for each block.
        self._events: list[BlockEvent] = []
        #: After the last block that arrived: blocks of a text arrive in their order.
        self._next_index = 0

    def expect(self, block: int, sequence: Sequence, index: int, token_ids: List[int]) -> None:
        """A step will compute the sequence's block `index`; its tokens are among these of the sequence."""
        if sequence.request.prompt_embeds is None:  # ids that stand for vectors say nothing to a router
            self._expected[block] = self._stored(sequence, index, token_ids)

    def arrive(self, block: int, sequence: Sequence, key: bytes) -> None:
        """A block of the sequence has come from disk."""
        index = self._index_of(key, sequence.block_keys)
        if index is not None and sequence.request.prompt_embeds is None:
            self._tell(block, self._stored(sequence, index, sequence.token_ids))
            self._next_index = index + 1

    def end_step(self, is_computed: bool) -> None:
        """The expected blocks can be found now, if the step was computed."""
        for block, stored in self._expected.items() if is_computed else ():
            self._tell(block, stored)
        self._expected.clear()

    def drop(self, block: int) -> None:
        """A block loses its key."""
        self._expected.pop(block, None)
        key = self._told.pop(block, None)
        if key is not None:
            self._events.append(BlocksRemoved((key,)))

    def clear(self) -> None:
        """All blocks lose their keys."""
        self._expected.clear()
        if self._told:  # else there is nothing that a router could still look for
            self._told.clear()
            self._events.append(AllCleared())

    def take(self) -> tuple[BlockEvent, ...]:
        """All events since the last call, in their order. Those that go on from each other are one."""
        if not self._events:
            return ()
        events = tuple(_joined(self._events))
        self._events.clear()
        return events

    def _index_of(self, key: bytes, keys: list[bytes]) -> int | None:
        index = self._next_index
        if index < len(keys) and keys[index] == key:
            return index
        return keys.index(key) if key in keys else None

    def _tell(self, block: int, stored: BlocksStored) -> None:
        self._told[block] = stored.keys[0]
        self._events.append(stored)

    def _stored(self, sequence: Sequence, index: int, token_ids: List[int]) -> BlocksStored:
        keys, start = sequence.block_keys, index * self._block_size
        adapter, salt = sequence.request.adapter, sequence.request.cache_salt
        return BlocksStored(
            (keys[index],),
            keys[index - 1] if index else b"",
            tuple(token_ids[start : start + self._block_size]),
            None if adapter is None else (adapter.name, int.from_bytes(adapter.digest[:4], "big") >> 1),
            hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest() if salt else "",
        )


def _joined(events: List[BlockEvent]) -> Iterator[BlockEvent]:
    """Each run of events that go on from each other as one. Thousands of blocks may come or go in a step, so
    that each event is copied once."""
    begin = 0
    for end in range(1, len(events) + 1):
        if end == len(events) or not _goes_on(events[end - 1], events[end]):
            yield _as_one(events[begin:end])
            begin = end


def _goes_on(event: BlockEvent, other: BlockEvent) -> bool:
    if isinstance(event, BlocksStored) and isinstance(other, BlocksStored):
        return event.goes_on_with(other)
    return isinstance(event, BlocksRemoved) and isinstance(other, BlocksRemoved)


def _as_one(run: List[BlockEvent]) -> BlockEvent:
    first = run[0]
    if isinstance(first, AllCleared):
        return first
    keys = tuple(chain.from_iterable(each.keys for each in run if not isinstance(each, AllCleared)))
    if isinstance(first, BlocksRemoved):
        return BlocksRemoved(keys)
    tokens = chain.from_iterable(each.token_ids for each in run if isinstance(each, BlocksStored))
    return replace(first, keys=keys, token_ids=tuple(tokens))
