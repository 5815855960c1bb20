"""BlockStore: what the scheduler knows of the stores that keep blocks beyond the KV cache. Numbers only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Set
from typing import NamedTuple, Protocol


class KeptBlock(NamedTuple):
    """A computed block of the cache that a store may keep."""

    block: int
    key: bytes
    #: The key of the block before it in the text; b"" for the first one.
    parent: bytes
    #: Tokens at its beginning that the key stands for.
    num_tokens: int


class Reading(Protocol):
    """Blocks on their way from a store."""

    @property
    def is_done(self) -> bool:
        """All are there that will come, or they take longer than they may."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning, or until the last block was there."""

    def end(self) -> set[bytes]:
        """The keys of the blocks that have arrived; no other block is written from now on."""

    @property
    def by_tier(self) -> dict[str, tuple[Set[bytes], float]]:
        """By the tier's name: the keys of the blocks that have arrived from there, and in how many
        seconds."""


class Writing(Protocol):
    """Blocks on their way to a store."""

    @property
    def is_done(self) -> bool:
        """All are there that the store takes, or they take longer than they may."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning, or until the last block was there."""


class BlockStore(Protocol):
    """Keeps blocks by key."""

    def __contains__(self, key: object) -> bool: ...

    @property
    def can_write(self) -> bool:
        """Whether the store takes blocks now."""

    def offer(self, block: int, key: bytes, parent: bytes, is_unchanged: Callable[[], bool]) -> None:
        """This block is computed, and may be kept as long as it is unchanged. `parent`: the key of the block
        before it in the text; b"" if there is none."""

    def expected_read_s(self, keys: Collection[bytes]) -> float:
        """What reading these blocks should take."""

    def expected_write_s(self, num_blocks: int) -> float:
        """What writing so many blocks should take, if they are written before all others."""

    def read(self, wanted: list[tuple[bytes, int]], limit_s: float) -> Reading:
        """Begin to read (key, block) pairs, which take `limit_s` seconds at most."""

    def write(self, offers: list[tuple[int, bytes, bytes, Callable[[], bool]]], limit_s: float) -> Writing:
        """Begin to write blocks before all others, for `limit_s` seconds at most: for each the arguments of
        offer()."""
