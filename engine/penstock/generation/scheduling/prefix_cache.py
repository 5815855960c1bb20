"""PrefixCache: finds blocks whose K and V a sequence can use, as it begins with the same tokens. Numbers
only.

A block gets its key when it is full. A prompt's last block, in which the answer goes on, gets a key at once,
which stands for the prompt's part of the block.

Keys are given when tokens are scheduled, before the tokens are computed: within a layer all K and V of a step
are written before attention reads any, so other sequences may share the block in the very same step. A step
that fails takes its keys back (rollback). Only certain tokens get keys in this way. Drafts get keys when they
are accepted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Iterator
from typing import NamedTuple, Protocol

from penstock.generation.scheduling.block_keys import encoder_keys, full_key, partial_key, tail_key
from penstock.generation.scheduling.block_pool import BlockPool
from penstock.generation.scheduling.events.block_log import BlockLog
from penstock.generation.scheduling.moving.block_store import KeptBlock
from penstock.generation.scheduling.states.kept_states import KeptStates
from penstock.generation.scheduling.states.state_pool import StatePool
from penstock.generation.scheduling.states.state_saves import StateSaves
from penstock.generation.sequence import Sequence


class Keeper(Protocol):
    """Keeps computed blocks elsewhere: BlockStore in moving/block_store.py."""

    def offer(self, block: int, key: bytes, parent: bytes, is_unchanged: Callable[[], bool]) -> None: ...


class FoundWith(NamedTuple):
    """What is here and elsewhere of a sequence's next tokens and its encoded input."""

    #: Blocks that are here, and the keys of the others with the tokens that these stand for.
    held: list[int]
    missing: dict[bytes, int]
    #: The key of the recurrent state behind them, if it lies elsewhere.
    state: bytes | None = None
    #: Tokens that need not be computed, if what is elsewhere comes here.
    num_tokens: int = 0


class PrefixCache:
    """Gives keys to a pool's blocks and looks blocks up by key."""

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
        self._states = states
        self._state_saves = StateSaves(states, block_size, kept_states)
        #: Blocks that got their keys in the step that is being decided or computed, each with the key of the
        #: block before it in the text.
        self._unconfirmed: dict[int, bytes] = {}
        self._log = log
        if log is not None:
            pool.on_drop = log.drop

    def is_read_by(self, sequence: Sequence) -> bool:
        """Whether a sequence looks for blocks. A sequence whose prompt is scored does not: every token has to
        be computed then."""
        return self._is_enabled and sequence.prompt_scores is None

    def find(self, sequence: Sequence) -> list[int]:
        """Blocks with the sequence's next tokens, beginning with the block of the first pending token; where
        the model has recurrent states, up to the last block behind which a state was kept."""
        if not (self.is_read_by(sequence) and sequence.num_pending_tokens > 1):
            return []
        return self._state_saves.reach(sequence, self._find(sequence))

    def _find(self, sequence: Sequence) -> list[int]:
        found: list[int] = []
        for key in self._next_keys(sequence):
            block = self._pool.find(key)
            if block is None:
                break
            found.append(block)
        for key, _ in self._partial_keys(sequence, len(found)):
            block = self._pool.find(key)
            if block is not None:
                return [*found, block]
        return found

    def find_with(self, sequence: Sequence, others: Container[bytes]) -> FoundWith:
        """The sequence's next tokens and its encoded input, as far as they are here or among the `others`;
        where the model has recurrent states, up to the last block behind which there is a state."""
        if not self.is_read_by(sequence):
            return FoundWith([], {})
        size = self._block_size
        here, elsewhere = self._sort(((key, size) for key in self._next_keys(sequence)), others)
        if self._states.is_needed:
            return self._with_state(sequence, len(here) + len(elsewhere), others)
        for partial in self._partial_keys(sequence, len(here) + len(elsewhere)):
            tail, more = self._sort((partial,), others)
            if tail or more:
                here, elsewhere = here + tail, elsewhere | more
                break
        if sequence.encoder is not None:
            keys = encoder_keys(sequence, -(-sequence.encoder.num_tokens // size))
            encoded, missing = self._sort(((key, size) for key in keys), others)
            if len(encoded) + len(missing) == len(keys):
                here, elsewhere = encoded + here, missing | elsewhere
        return FoundWith(here, elsewhere, num_tokens=sum(elsewhere.values()))

    def _with_state(self, sequence: Sequence, num_found: int, others: Container[bytes]) -> FoundWith:
        """Of `num_found` blocks those that can be used with a state behind them."""
        num_here, size = len(self.find(sequence)), self._block_size
        num_blocks, state = self._state_saves.reach_on_disk(sequence, num_found)
        keys = itertools.islice(self._next_keys(sequence), num_blocks)
        here, elsewhere = self._sort(((key, size) for key in keys), others)
        return FoundWith(here, elsewhere, state, (num_blocks - num_here) * size)

    def _next_keys(self, sequence: Sequence) -> Iterator[bytes]:
        """The keys of the sequence's whole blocks from the first pending token on."""
        size = self._block_size
        for index in range(sequence.num_computed_tokens // size, sequence.num_tokens // size):
            yield full_key(sequence, index, sequence.token_ids, size)

    def _partial_keys(self, sequence: Sequence, num_found: int) -> Iterator[tuple[bytes, int]]:
        """The keys of a part of the block behind `num_found` blocks with the sequence's next tokens, each
        with the tokens that it stands for: the prompt's last part, and what the sequence had computed."""
        size, num_left = self._block_size, sequence.num_left_tokens
        index = sequence.num_computed_tokens // size + num_found
        length = sequence.num_tokens % size
        if index == sequence.num_tokens // size and length and not sequence.num_output_tokens:
            yield tail_key(sequence, size), length
        if index == num_left // size and num_left % size and num_left > sequence.num_computed_tokens:
            yield partial_key(sequence, num_left, size), num_left % size

    def _sort(
        self, keys: Iterable[tuple[bytes, int]], others: Container[bytes]
    ) -> tuple[list[int], dict[bytes, int]]:
        """The blocks of the keys that are here, and the keys among the others, up to a key that is
        nowhere."""
        here, elsewhere = list[int](), dict[bytes, int]()
        for key, num_tokens in keys:
            block = self._pool.find(key)
            if block is not None:
                here.append(block)
            elif key in others:
                elsewhere[key] = num_tokens
            else:
                break
        return here, elsewhere

    def keep_tail(self, sequence: Sequence) -> None:
        """The sequence is about to lose its blocks. What it has computed of a block that is not full can be
        found from now on."""
        num_tokens, table = sequence.num_computed_tokens, sequence.block_table
        index, length = divmod(num_tokens, self._block_size)
        sequence.num_left_tokens = num_tokens
        if not length or not self.is_read_by(sequence) or self._states.is_needed or index >= len(table):
            return
        if length > self._pool.num_keyed_tokens(table[index]):
            self._pool.set_key(table[index], partial_key(sequence, num_tokens, self._block_size), length)

    def kept_blocks(self, sequence: Sequence) -> Iterator[KeptBlock]:
        """The blocks with what the sequence has computed that can be found, in the order of the text: first
        those of its encoded input."""
        if not self.is_read_by(sequence) or self._states.is_needed:
            return
        chains = [self._computed_keys(sequence)]
        if sequence.encoder is not None:
            keys = encoder_keys(sequence, len(sequence.encoder.block_table))
            chains.insert(0, ((key, self._block_size) for key in keys))
        for chain in chains:
            before = b""
            for key, num_tokens in chain:
                block = self._pool.find(key)
                if block is None:
                    break
                yield KeptBlock(block, key, before, num_tokens)
                before = key

    def _computed_keys(self, sequence: Sequence) -> Iterator[tuple[bytes, int]]:
        """The keys of the sequence's blocks with computed tokens, and how many tokens each stands for."""
        size, num_tokens = self._block_size, sequence.num_computed_tokens
        for index in range(num_tokens // size):
            yield full_key(sequence, index, sequence.token_ids, size), size
        if num_tokens % size:
            yield partial_key(sequence, num_tokens, size), num_tokens % size

    def adopt_state(self, sequence: Sequence, num_blocks: int) -> None:
        """The sequence goes on behind its first blocks, which find() has found."""
        self._state_saves.adopt(sequence, num_blocks)

    def find_encoder(self, sequence: Sequence, num_blocks: int) -> list[int]:
        """The blocks of the sequence's encoded input, if all of them are in the cache; else none."""
        if not self.is_read_by(sequence):
            return []
        found = [self._pool.find(key) for key in encoder_keys(sequence, num_blocks)]
        blocks = [block for block in found if block is not None]
        return blocks if len(blocks) == num_blocks else []

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
        return self._state_saves.plan(sequence, end)

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
        self._state_saves.end_step(is_computed=True)
        if self._log is not None:
            self._log.end_step(is_computed=True)

    def rollback(self) -> None:
        """The step was not computed. Every sequence that had a part in it must be released."""
        for block in self._unconfirmed:
            self._pool.drop_key(block)
        self._unconfirmed.clear()
        self._state_saves.end_step(is_computed=False)
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

    def leave(self, sequence: Sequence) -> None:
        """The sequence lets go of its blocks and its state."""
        self._state_saves.leave(sequence)

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
