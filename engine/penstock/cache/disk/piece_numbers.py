"""PieceNumbers: by which numbers and keys a store knows the pieces of recurrent states. Numbers only."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from penstock.cache.disk.record import KEY_BYTES, STATE_TAG


@dataclass(frozen=True)
class PieceNumbers:
    """Which numbers the pieces have: they follow those of the cache's blocks, slot after slot."""

    first: int
    num_pieces: int

    def of_slot(self, slot: int) -> range:
        """The numbers of the pieces of a slot's state."""
        start = self.first + slot * self.num_pieces
        return range(start, start + self.num_pieces)

    def keys(self, key: bytes) -> list[bytes]:
        """The keys of the pieces of the state at the end of the block with this key."""
        return [self.key(key, index) for index in range(self.num_pieces)]

    def key(self, key: bytes, index: int) -> bytes:
        """The key of one of these pieces."""
        digest = hashlib.sha256(key + index.to_bytes(4, "big")).digest()
        return STATE_TAG + digest[: KEY_BYTES - len(STATE_TAG)]
