"""PrefixLookup: which blocks have the K and V of a sequence's next tokens, here and elsewhere. Numbers only.
A look changes nothing: prefix_cache.py gives the keys."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

from penstock.generation.blocks.block_keys import encoder_keys, full_key, partial_key, tail_key
from penstock.generation.blocks.block_pool import BlockPool
from penstock.generation.blocks.block_store import KeptBlock
from penstock.generation.blocks.state_saves import StateSaves
from penstock.generation.sequence import Sequence


class FoundWith(NamedTuple):
    """What is here and elsewhere of a sequence's next tokens and its encoded input."""

    #: Blocks that are here, and the keys of the others with the tokens that these stand for.
    held: list[int]
    missing: dict[bytes, int]
    #: The key of the recurrent state after them, if it lies elsewhere.
    state: bytes | None = None
    #: Tokens that need not be computed, if what is elsewhere comes here.
    num_tokens: int = 0


class PrefixLookup:
    """Looks blocks of a pool up by key."""

    def __init__(self, pool: BlockPool, block_size: int, is_enabled: bool, state_saves: StateSaves) -> None:
        """state_saves: which copies of recurrent states were kept, if the model has such states."""
        self._pool = pool
        self._block_size = block_size
        self._is_enabled = is_enabled
        self._state_saves = state_saves

    def is_read_by(self, sequence: Sequence) -> bool:
        """Whether a sequence looks for blocks. A sequence whose prompt is scored does not: every token has to
        be computed then."""
        return self._is_enabled and sequence.prompt_scores is None

    def find(self, sequence: Sequence) -> list[int]:
        """Blocks with the sequence's next tokens, beginning with the block of the first pending token; where
        the model has recurrent states, up to the last block after which a state was kept."""
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
        where the model has recurrent states, up to the last block after which there is a state."""
        if not self.is_read_by(sequence):
            return FoundWith([], {})
        size = self._block_size
        here, elsewhere = self._sort(((key, size) for key in self._next_keys(sequence)), others)
        if self._state_saves.is_needed:
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
        """Of `num_found` blocks those that can be used with a state after them."""
        num_here, size = len(self.find(sequence)), self._block_size
        num_blocks, state = self._state_saves.reach_on_disk(sequence, num_found)
        keys = itertools.islice(self._next_keys(sequence), num_blocks)
        here, elsewhere = self._sort(((key, size) for key in keys), others)
        return FoundWith(here, elsewhere, state, (num_blocks - num_here) * size)

    def find_encoder(self, sequence: Sequence, num_blocks: int) -> list[int]:
        """The blocks of the sequence's encoded input, if all of them are in the cache; else none."""
        if not self.is_read_by(sequence):
            return []
        found = [self._pool.find(key) for key in encoder_keys(sequence, num_blocks)]
        blocks = [block for block in found if block is not None]
        return blocks if len(blocks) == num_blocks else []

    def kept_blocks(self, sequence: Sequence) -> Iterator[KeptBlock]:
        """The blocks with what the sequence has computed that can be found, in the order of the text: first
        those of its encoded input."""
        if not self.is_read_by(sequence) or self._state_saves.is_needed:
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

    def _next_keys(self, sequence: Sequence) -> Iterator[bytes]:
        """The keys of the sequence's whole blocks from the first pending token on."""
        size = self._block_size
        for index in range(sequence.num_computed_tokens // size, sequence.num_tokens // size):
            yield full_key(sequence, index, sequence.token_ids, size)

    def _partial_keys(self, sequence: Sequence, num_found: int) -> Iterator[tuple[bytes, int]]:
        """The keys of a part of the block after `num_found` blocks with the sequence's next tokens, each
        with the tokens that it stands for: the prompt's last part, and what the sequence had computed."""
        size, num_left = self._block_size, sequence.num_left_tokens
        index = sequence.num_computed_tokens // size + num_found
        length = sequence.num_tokens % size
        if index == sequence.num_tokens // size and length and not sequence.num_output_tokens:
            yield tail_key(sequence, size), length
        if index == num_left // size and num_left % size and num_left > sequence.num_computed_tokens:
            yield partial_key(sequence, num_left, size), num_left % size

    def _computed_keys(self, sequence: Sequence) -> Iterator[tuple[bytes, int]]:
        """The keys of the sequence's blocks with computed tokens, and how many tokens each stands for."""
        size, num_tokens = self._block_size, sequence.num_computed_tokens
        for index in range(num_tokens // size):
            yield full_key(sequence, index, sequence.token_ids, size), size
        if num_tokens % size:
            yield partial_key(sequence, num_tokens, size), num_tokens % size

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
