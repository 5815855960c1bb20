"""BlockManager: which KV blocks are free and which sequence owns which. Numbers only."""

from __future__ import annotations

from penstock.generation.sequence import Sequence


class BlockManager:
    """Owns the ids 0 .. num_blocks - 1; each is free or in exactly one sequence's block_table."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.block_size)

    def can_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether the sequence could hold `num_tokens` tokens now."""
        return self.blocks_for(num_tokens) - len(sequence.block_table) <= len(self._free)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Give the sequence the blocks for `num_tokens` tokens; can_grow() must have said yes."""
        while len(sequence.block_table) < self.blocks_for(num_tokens):
            sequence.block_table.append(self._free.pop())

    def release(self, sequence: Sequence) -> None:
        """Take back all blocks of a sequence."""
        self._free.extend(reversed(sequence.block_table))
        sequence.block_table.clear()
