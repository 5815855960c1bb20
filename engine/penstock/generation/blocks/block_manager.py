"""BlockManager: the KV blocks of each sequence, and its recurrent state. Numbers only.

Sequences that begin with the same tokens share blocks. A sequence that goes on otherwise gets a copy of the
shared block before it writes there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.generation.blocks.block_pool import BlockPool
from penstock.generation.blocks.block_store import BlockStore
from penstock.generation.blocks.departures import Departures
from penstock.generation.blocks.disk_blocks import DiskBlocks
from penstock.generation.blocks.kept_states import KeptStates
from penstock.generation.blocks.prefix_cache import PrefixCache
from penstock.generation.blocks.state_pool import StatePool
from penstock.generation.scheduling.sequence_group import together
from penstock.generation.sequence import Sequence

if TYPE_CHECKING:
    from penstock.cache.disk.piece_numbers import PieceNumbers
    from penstock.generation.blocks.block_log import BlockLog


class BlockManager:
    """Fills and empties the sequences' block tables."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        states: StatePool | None = None,
        store: BlockStore | None = None,
        compute_s: Callable[[int], float] = lambda num_tokens: 0.0,
        pieces: PieceNumbers | None = None,
        log: BlockLog | None = None,
    ) -> None:
        """`states`: of a model with recurrent states. `store` keeps blocks that outlive this manager;
        compute_s: tokens of a prompt -> seconds that computing them takes, 0: unknown. `pieces`: by which
        numbers the store knows the states. `log` is told of blocks that can be found."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.states = states or StatePool()
        kept = None
        if store is not None and pieces is not None:
            kept = KeptStates(self.states, store, pieces, compute_s)
        self.prefix_cache = PrefixCache(
            self.pool, block_size, enable_prefix_caching, self.states, store, kept, log
        )
        self.departures = Departures(self.pool, self.prefix_cache, store, compute_s)
        preemptions = self.departures.counts
        self.disk = DiskBlocks(self.pool, self.prefix_cache, store, compute_s, preemptions, kept)
        self._copies: list[tuple[int, int]] = []

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.block_size)

    def num_missing(self, sequence: Sequence) -> int:
        """Free blocks that a sequence without blocks takes for all its tokens and its encoded input, together
        with the others of its group."""
        num_blocks, num_shared = 0, 0
        had = set[int]()
        for member in together(sequence):
            num_blocks += self.blocks_for(member.num_tokens)
            found = self.prefix_cache.lookup.find(member)
            shared = [block for block in found if block in had or self.pool.num_owners[block] > 0]
            is_copied = shared[-1:] == found[-1:] and self._is_copied(member, found)
            num_shared += len(shared) - is_copied
            had.update(found)
        if sequence.encoder is not None:
            num_blocks += self.blocks_for(sequence.encoder.num_tokens)
            num_shared += sum(self.pool.num_owners[block] > 0 for block in self.find_encoder(sequence))
        return num_blocks - num_shared

    def _is_copied(self, sequence: Sequence, found: list[int]) -> bool:
        """Whether a sequence without blocks would write after the tokens for which the last of the `found`
        blocks stands: it gets a copy then, if the block has another owner."""
        num_found = sum(map(self.pool.num_keyed_tokens, found))
        return num_found % self.block_size > 0 and num_found < sequence.num_tokens

    def find_encoder(self, sequence: Sequence) -> list[int]:
        """Blocks with the sequence's encoded input, if others have encoded all of it, or will in this
        step."""
        assert sequence.encoder is not None
        for member in sequence.group.members if sequence.group is not None else ():
            if member.encoder is not None and member.encoder.block_table:
                return list(member.encoder.block_table)
        return self.prefix_cache.lookup.find_encoder(sequence, self.blocks_for(sequence.encoder.num_tokens))

    def place_encoder(self, sequence: Sequence) -> bool:
        """Give a sequence the blocks of its encoded input. True if the input has to be encoded in this
        step."""
        encoder = sequence.encoder
        assert encoder is not None and not encoder.block_table
        for block in self.find_encoder(sequence):
            self.pool.own(block)
            encoder.block_table.append(block)
        if encoder.block_table:
            return False
        encoder.block_table += [self.pool.take() for _ in range(self.blocks_for(encoder.num_tokens))]
        self.prefix_cache.register_encoder(sequence)
        return True

    def adopt(self, sequence: Sequence) -> int:
        """Share the blocks of the sequence's next tokens that others have computed, or will in this step.
        Returns how many of the sequence's tokens are in the cache then. The last token is never counted: the
        sequence computes it, since its logits are wanted. If the last token lies in a shared block, the
        sequence writes the same K and V there once more."""
        found, table = self.prefix_cache.lookup.find(sequence), sequence.block_table
        if not found:
            return sequence.num_computed_tokens
        first = sequence.num_computed_tokens // self.block_size
        for index, block in enumerate(found, start=first):
            self.pool.own(block)
            if index < len(table):
                self.pool.disown(table[index])
                table[index] = block
            else:
                table.append(block)
        self.prefix_cache.state_saves.adopt(sequence, first + len(found))
        num_found = sum(map(self.pool.num_keyed_tokens, found))
        return min(first * self.block_size + num_found, sequence.num_tokens - 1)

    def grow(self, sequence: Sequence) -> bool:
        """Give a sequence blocks for all its tokens, and a copy of the block of the next token if the
        sequence must not write into that block; and a slot for its state. False, and no blocks are given, if
        there are too few free blocks."""
        self.states.place(sequence)
        table, pool = sequence.block_table, self.pool
        num_new = max(0, self.blocks_for(sequence.num_tokens) - len(table))
        is_diverging = _is_diverging(sequence, pool, self.block_size)
        if not (num_new or is_diverging):
            return True
        if num_new + is_diverging > pool.num_free:
            return False
        if is_diverging:
            index = sequence.num_computed_tokens // self.block_size
            shared, table[index] = table[index], self.copy(table[index])
            pool.disown(shared)
        table.extend(pool.take() for _ in range(num_new))
        return True

    def copy(self, block: int) -> int:
        """A free block that has the same K and V as another one when the step begins to write."""
        self._copies.append((block, self.pool.take()))
        return self._copies[-1][1]

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Let a sequence without blocks go on from all tokens of another one, in the same blocks. The first
        of the two that writes into the last block gets a copy: grow()."""
        for own, other in zip(child.block_tables, parent.block_tables, strict=True):
            own += other
            for block in other:
                self.pool.own(block)
        self.states.share(parent, child)

    def release(self, sequence: Sequence) -> None:
        """Take a sequence's blocks back. The last ones will be taken first: a prefix without its beginning
        can't be found."""
        self.prefix_cache.state_saves.leave(sequence)
        for table in sequence.block_tables:
            for block in reversed(table):
                self.pool.disown(block)
            table.clear()
        self.states.release(sequence)

    def forget_all(self) -> None:
        """No block and no copy of a state holds what it held, and none can be found. Sequences keep their
        tables until they are released."""
        self._copies.clear()
        self.prefix_cache.forget_all()
        self.states.forget_all()

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The copies (source, destination) that the step has to make before it writes, in this order. The
        step may write into a source."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies


def _is_diverging(sequence: Sequence, pool: BlockPool, block_size: int) -> bool:
    """Whether the next token would overwrite what others see in the same block."""
    index, offset = divmod(sequence.num_computed_tokens, block_size)
    if index >= len(sequence.block_table):
        return False
    block = sequence.block_table[index]
    return pool.num_owners[block] > 1 and offset >= pool.num_keyed_tokens(block)
