"""PrefixCache: gives blocks keys by which sequences that begin with the same tokens find them
(prefix_lookup.py). Numbers only.

A block gets its key when it is full. A prompt's last block, in which the answer goes on, gets a key at once,
which stands for the prompt's part of the block.

Keys are given when tokens are scheduled, before the tokens are computed: within a layer all K and V of a step
are written before attention reads any, so other sequences may share the block in the very same step. A step
that fails takes its keys back (rollback). Only certain tokens get keys in this way. Drafts get keys when they
are accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from penstock.generation.blocks.block_keys import encoder_keys, full_key, partial_key, tail_key
from penstock.generation.blocks.block_pool import BlockPool
from penstock.generation.blocks.prefix_lookup import PrefixLookup
from penstock.generation.blocks.state_pool import StatePool
from penstock.generation.blocks.state_saves import StateSaves
from penstock.generation.sequence import Sequence

if TYPE_CHECKING:
    from penstock.generation.blocks.block_log import BlockLog
    from penstock.generation.blocks.kept_states import KeptStates


class Keeper(Protocol):
    """Keeps computed blocks elsewhere: BlockStore in moving/block_store.py."""

    def offer(self, block: int, key: bytes, parent: bytes, is_unchanged: Callable[[], bool]) -> None: ...


class PrefixCache:
    """Gives keys to a pool's blocks, and takes them back."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        is_enabled: bool,
        states: StatePool,
        keeper: Keeper | None = None,
        kept_states: KeptStates | None = None,
        log: BlockLog | None = None,
    ) -> None:
        """Whole blocks are offered to the `keeper` when they were computed. kept_states: copies of states
        that the same keeper has. `log` is told of the whole blocks of texts that can be found."""
        self._pool = pool
        self._keeper = keeper
        self._block_size = block_size
        self._is_enabled = is_enabled
        #: Of models with recurrent states: the copies of them that are kept.
        self.state_saves = StateSaves(states, block_size, kept_states)
        self.lookup = PrefixLookup(pool, block_size, is_enabled, self.state_saves)
        #: Blocks that got their keys in the step that is being decided or computed, each with the key of the
        #: block before it in the text.
        self._unconfirmed: dict[int, bytes] = {}
        self._log = log
        if log is not None:
            pool.on_drop = log.drop

    def keep_tail(self, sequence: Sequence) -> None:
        """The sequence is about to lose its blocks. What it has computed of a block that is not full can be
        found from now on."""
        num_tokens, table = sequence.num_computed_tokens, sequence.block_table
        index, length = divmod(num_tokens, self._block_size)
        sequence.num_left_tokens = num_tokens
        is_kept = self.lookup.is_read_by(sequence) and not self.state_saves.is_needed
        if not length or not is_kept or index >= len(table):
            return
        if length > self._pool.num_keyed_tokens(table[index]):
            self._pool.set_key(table[index], partial_key(sequence, num_tokens, self._block_size), length)

    def register_encoder(self, sequence: Sequence) -> None:
        """The sequence's input will be encoded in this step: its blocks can be found from now on."""
        if not self._is_enabled or sequence.encoder is None:
            return
        table, before = sequence.encoder.block_table, b""
        for block, key in zip(table, encoder_keys(sequence, len(table)), strict=True):
            self._set_key(block, key, self._block_size, before)
            before = key

    def register(self, sequence: Sequence, end: int) -> tuple[tuple[int, int], ...]:
        """The sequence's tokens up to `end` will be computed in this step. The blocks that become full, and
        the prompt's last block, can be found from now on. Returns ScheduledSequence.saves."""
        if not self._is_enabled:
            return ()
        size, table = self._block_size, sequence.block_table
        for index in range(sequence.num_computed_tokens // size, end // size):
            self._set_full(sequence, index, sequence.token_ids)
        if end % size and end == sequence.num_prompt_tokens:
            self._set_key(table[end // size], tail_key(sequence, size), end % size)
        return self.state_saves.plan(sequence, end)

    def register_accepted(self, sequence: Sequence, accepted: tuple[int, ...]) -> None:
        """These drafts, which follow the sequence's tokens, were computed and were right."""
        if not self._is_enabled:
            return
        size, token_ids = self._block_size, [*sequence.token_ids, *accepted]
        for index in range(sequence.num_tokens // size, len(token_ids) // size):
            self._set_full(sequence, index, token_ids)

    def confirm(self) -> None:
        """The step was computed."""
        if self._keeper is not None:
            self._offer(self._keeper)
        self._unconfirmed.clear()
        self.state_saves.end_step(is_computed=True)
        if self._log is not None:
            self._log.end_step(is_computed=True)

    def rollback(self) -> None:
        """The step was not computed. Every sequence that had a part in it must be released."""
        for block in self._unconfirmed:
            self._pool.drop_key(block)
        self._unconfirmed.clear()
        self.state_saves.end_step(is_computed=False)
        if self._log is not None:
            self._log.end_step(is_computed=False)

    def land(self, sequence: Sequence, block: int, key: bytes, num_tokens: int) -> None:
        """A block of the sequence, or a part of one, has come from disk, and can be found from now on."""
        if self._pool.set_key(block, key, num_tokens) and self._log is not None:
            self._log.arrive(block, sequence, key)

    def forget_all(self) -> None:
        """No block can be found any more."""
        self.rollback()
        if self._log is not None:  # first: it need not hear of each block
            self._log.clear()
        for block in range(self._pool.num_blocks):
            self._pool.drop_key(block)

    def _offer(self, keeper: Keeper) -> None:
        """Offer the whole blocks of the step. Nobody writes into them before they are taken again."""
        pool, size = self._pool, self._block_size
        for block, before in self._unconfirmed.items():
            if pool.num_keyed_tokens(block) == size:
                keeper.offer(block, pool.key_of(block), before, pool.watch(block))

    def _set_full(self, sequence: Sequence, index: int, token_ids: list[int]) -> None:
        key = full_key(sequence, index, token_ids, self._block_size)
        before = sequence.block_keys[index - 1] if index else b""
        block = sequence.block_table[index]
        if self._set_key(block, key, self._block_size, before) and self._log is not None:
            self._log.expect(block, sequence, index, token_ids)

    def _set_key(self, block: int, key: bytes, num_tokens: int, before: bytes = b"") -> bool:
        """Whether the block has this key now, and had it not before."""
        is_new = self._pool.set_key(block, key, num_tokens)
        if is_new:
            self._unconfirmed[block] = before
        return is_new
