"""KVTiers: where blocks of the KV cache are kept beyond it: on the host where a card computes, and on disk.

Blocks go from the card to the host, and from there to the disk. A block comes from the first tier that has
it; one from disk is kept on the host, too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence, Set
from typing import Any

from penstock.cache.disk.block_offers import BlockWrite
from penstock.cache.disk.block_reads import BlockRead
from penstock.cache.disk.kv_store import KVStore
from penstock.cache.disk.piece_numbers import PieceNumbers


class TieredRead:
    """Blocks of one sequence on their way from several tiers. Made and ended by one thread."""

    def __init__(self, reads: list[BlockRead]) -> None:
        self._reads = reads

    @property
    def is_done(self) -> bool:
        return all(read.is_done for read in self._reads)

    @property
    def elapsed_s(self) -> float:
        return max(read.elapsed_s for read in self._reads)

    def end(self) -> set[bytes]:
        return set[bytes]().union(*(read.end() for read in self._reads))

    @property
    def by_tier(self) -> dict[str, tuple[Set[bytes], float]]:
        return {tier: found for read in self._reads for tier, found in read.by_tier.items()}


class KVTiers:
    """One or two stores as one: the first is the next one to the KV cache. Close it."""

    def __init__(self, stores: Sequence[KVStore[Any]]) -> None:
        self._stores = tuple(stores)

    def __iter__(self) -> Iterator[KVStore[Any]]:
        return iter(self._stores)

    def __contains__(self, key: object) -> bool:
        return any(key in store for store in self._stores)

    def find(self, tier: str) -> KVStore[Any] | None:
        """The store of this name."""
        return next((store for store in self._stores if store.tier.name == tier), None)

    @property
    def pieces(self) -> PieceNumbers | None:
        """By which numbers recurrent states can be offered and read; None: they are not kept."""
        return self._stores[-1].pieces

    @property
    def can_write(self) -> bool:
        return self._stores[0].can_write

    def offer(self, block: int, key: bytes, parent: bytes, is_unchanged: Callable[[], bool]) -> None:
        self._stores[0].offer(block, key, parent, is_unchanged)

    def write(
        self, offers: Sequence[tuple[int, bytes, bytes, Callable[[], bool]]], limit_s: float
    ) -> BlockWrite:
        return self._stores[0].write(offers, limit_s)

    def expected_write_s(self, num_blocks: int) -> float:
        return self._stores[0].expected_write_s(num_blocks)

    def expected_read_s(self, keys: Collection[bytes]) -> float:
        """What reading these blocks should take; those that are nowhere yet will be in the first tier."""
        return sum(store.expected_read_s(part) for store, part in self._divided(keys).items())

    def read(self, wanted: list[tuple[bytes, int]], limit_s: float) -> TieredRead:
        """Begin to read (key, block) pairs, which take `limit_s` seconds at most."""
        parts, blocks = self._divided([key for key, _ in wanted]), dict(wanted)
        reads = [
            store.read([(key, blocks[key]) for key in keys], limit_s) for store, keys in parts.items() if keys
        ]
        return TieredRead(reads)

    def wait(self, timeout_s: float = 0.05) -> None:
        """Until a block has come or gone, or the time is up."""
        self._stores[0].wait(timeout_s)

    def close(self) -> None:
        """Write what is left, which takes seconds at most, and end the threads."""
        for store in self._stores:
            store.close()

    def _divided(self, keys: Collection[bytes]) -> dict[KVStore[Any], list[bytes]]:
        """The keys by the first tier that has them."""
        found: dict[KVStore[Any], list[bytes]] = {store: [] for store in self._stores}
        for key in keys:
            found[next((store for store in self._stores if key in store), self._stores[0])].append(key)
        return found
