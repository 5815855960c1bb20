"""BlockLog: which whole blocks can be found in the prefix cache, as events for routers. Numbers only.

A block is told of when its tokens were computed, or when it has come from disk. It is told of again when it
loses its key. So whoever follows the events from the beginning knows what a prompt would find. A prompt's
last block, which is not full, is not told of."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as List
from dataclasses import dataclass

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

    def then(self, other: BlocksStored) -> BlocksStored | None:
        """Both as one event; None if the other does not go on from this one."""
        if other.parent != self.keys[-1] or (other.adapter, other.salt) != (self.adapter, self.salt):
            return None
        keys, token_ids = self.keys + other.keys, self.token_ids + other.token_ids
        return BlocksStored(keys, self.parent, token_ids, self.adapter, self.salt)


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
        self._events: list[BlockEvent] = []

    @property
    def known(self) -> frozenset[bytes]:
        """The keys that somebody knows who has followed all events."""
        return frozenset(self._told.values())

    def expect(self, block: int, sequence: Sequence, index: int, token_ids: List[int]) -> None:
        """A step will compute the sequence's block `index`; its tokens are among these of the sequence."""
        if sequence.request.prompt_embeds is None:  # ids that stand for vectors say nothing to a router
            self._expected[block] = self._stored(sequence, index, token_ids)

    def arrive(self, block: int, sequence: Sequence, key: bytes) -> None:
        """A block of the sequence has come from disk."""
        if key in sequence.block_keys and sequence.request.prompt_embeds is None:
            self._tell(block, self._stored(sequence, sequence.block_keys.index(key), sequence.token_ids))

    def end_step(self, is_computed: bool) -> None:
        """The expected blocks can be found now, if the step was computed."""
        for block, stored in self._expected.items() if is_computed else ():
            self._tell(block, stored)
        self._expected.clear()

    def drop(self, block: int) -> None:
        """A block loses its key."""
        self._expected.pop(block, None)
        key = self._told.pop(block, None)
        if key is None:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved):
            self._events[-1] = BlocksRemoved((*last.keys, key))
        else:
            self._events.append(BlocksRemoved((key,)))

    def clear(self) -> None:
        """All blocks lose their keys."""
        self._expected.clear()
        self._told.clear()
        self._events.append(AllCleared())

    def take(self) -> tuple[BlockEvent, ...]:
        """All events since the last call, in their order."""
        events = tuple(self._events)
        self._events.clear()
        return events

    def _tell(self, block: int, stored: BlocksStored) -> None:
        self._told[block] = stored.keys[0]
        last = self._events[-1] if self._events else None
        joined = last.then(stored) if isinstance(last, BlocksStored) else None
        if joined is None:
            self._events.append(stored)
        else:
            self._events[-1] = joined

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
