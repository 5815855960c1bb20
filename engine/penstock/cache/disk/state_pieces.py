"""StatePieces: recurrent states as blocks of a KV cache's size, so that they lie on disk beside the blocks.

A state is large (75 MiB with Qwen3-Next, where a block of keys and values has 0.4 MB) and belongs to the end
of one block. It is kept as pieces, each of a block's size and under a key of its own. So the files, checksums
and limits of blocks serve states too. A piece gives way before the block at whose end the state stands.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.cache.disk.piece_numbers import PieceNumbers
from penstock.cache.kv_cache import KVCache


class StatePieces:
    """A cache's blocks, and after them the pieces of its states."""

    def __init__(self, cache: KVCache) -> None:
        """The cache has states."""
        self._cache = cache
        self.block_bytes = cache.block_bytes
        rows = [part.view(len(part), -1).view(torch.uint8) for parts in cache.states for part in parts]
        ends = torch.tensor([row.shape[1] for row in rows]).cumsum(0).tolist()
        #: Parts of states, uint8 [num_states, bytes], each with the place of its bytes in a whole state.
        self._rows = [(row, end - row.shape[1], end) for row, end in zip(rows, ends, strict=True)]
        self.numbers = PieceNumbers(cache.num_blocks, -(-ends[-1] // self.block_bytes))

    def read_block(self, block: int, out: Tensor) -> None:
        """As KVCache.read_block(). After the end of a state there are zeros."""
        if block < self.numbers.first:
            return self._cache.read_block(block, out)
        num_bytes = 0
        for place, part in self._parts(block):
            out[place : place + len(part)].copy_(part)
            num_bytes += len(part)
        out[num_bytes : self.block_bytes].zero_()

    def write_block(self, block: int, content: Tensor) -> None:
        """As KVCache.write_block()."""
        if block < self.numbers.first:
            return self._cache.write_block(block, content)
        for place, part in self._parts(block):
            part.copy_(content[place : place + len(part)])

    def _parts(self, block: int) -> Iterator[tuple[int, Tensor]]:
        """The bytes of states that a piece has, each with their place in the piece."""
        slot, piece = divmod(block - self.numbers.first, self.numbers.num_pieces)
        first = piece * self.block_bytes
        for row, start, end in self._rows:
            low, high = max(start, first), min(end, first + self.block_bytes)
            if low < high:
                yield low - first, row[slot, low - start : high - start]
