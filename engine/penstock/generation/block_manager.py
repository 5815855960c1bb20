"""BlockManager: which KV blocks are free, who owns which, and whose tokens they hold. Numbers only.

Sequences that begin with the same tokens share blocks. A block is found by its key: SHA-256 of its tokens and
of the key before it, so it stands for all tokens from the sequence's beginning, and nobody finds what another
prompt wrote. The first key of a chain comes from the sequence's cache_salt and from the length that rope's
frequencies belong to: blocks whose K was turned by other frequencies are not found. A block gets its key when
it is full; the last one of a prompt, which the answer goes on in, gets one at once that stands for the
prompt's part of it.

Keys are given when tokens are scheduled, before they are computed: within a layer all K and V of a step are
written before attention reads any, so others may share them in the very same step. A step that fails takes
them back (rollback). Only tokens that are certain get keys so: drafts get theirs when they turn out to be
right (accept), and what was reserved for the others is given back.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict

from penstock.generation.sequence import Sequence


class BlockManager:
    """Owns the ids 0 .. num_blocks - 1; each is free or in the block_table of one or more sequences. A free
    one keeps its key until it is taken for other tokens, the least recently used first."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._is_caching = enable_prefix_caching
        self._num_owners = [0] * num_blocks
        #: The next one to take comes first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._found: dict[bytes, int] = {}
        #: Block -> its key, and of how many tokens. Only blocks that can be found, so all that are shared.
        self._keys: dict[int, tuple[bytes, int]] = {}
        #: Got their keys in the step that is being decided or computed.
        self._unconfirmed: list[int] = []
        self._copies: list[tuple[int, int]] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------ blocks for a sequence

    def num_missing(self, sequence: Sequence) -> int:
        """Free blocks that a sequence without blocks takes for all its tokens."""
        shared = sum(self._num_owners[block] > 0 for block in self._find(sequence))
        return self.blocks_for(sequence.num_tokens) - shared

    def is_looked_up(self, sequence: Sequence) -> bool:
        """Whether others may have computed what the sequence begins with."""
        return self._is_caching and sequence.reads_prefix_cache

    def adopt(self, sequence: Sequence) -> int:
        """Take over what others have computed, or will in this step, of the sequence's next tokens. Returns
        how many tokens are in the cache then. The last token is left to the sequence: its logits are wanted.
        If that lies in an adopted block the sequence writes there what is there already."""
        found, table = self._find(sequence), sequence.block_table
        if not found:
            return sequence.num_computed_tokens
        first = sequence.num_computed_tokens // self.block_size
        for index, block in enumerate(found, start=first):
            self._own(block)
            if index < len(table):
                self._disown(table[index])
                table[index] = block
            else:
                table.append(block)
        return min((first + len(found)) * self.block_size, sequence.num_tokens - 1)

    def grow(self, sequence: Sequence) -> bool:
        """Blocks for all tokens of a sequence, and one of its own where the next token goes: if it shares
        that, it gets a copy. False, and nothing is done, if there are too few."""
        table = sequence.block_table
        num_new = max(0, self.blocks_for(sequence.num_tokens) - len(table))
        is_diverging = self._is_diverging(sequence)
        if num_new + is_diverging > len(self._free):
            return False
        if is_diverging:
            index = sequence.num_computed_tokens // self.block_size
            shared, table[index] = table[index], self._take()
            self._disown(shared)
            self._copies.append((shared, table[index]))
        table.extend(self._take() for _ in range(num_new))
        return True

    def extend(self, sequence: Sequence, num_drafts: int) -> int:
        """Blocks for guesses that follow the sequence's tokens, which have blocks. Returns for how many, of
        `num_drafts` at most: nothing that others see is written over, and nobody gives way to a guess."""
        table, end = sequence.block_table, sequence.num_tokens
        if end % self.block_size and self._num_owners[table[end // self.block_size]] > 1:
            return 0
        num_drafts = min(num_drafts, (len(table) + len(self._free)) * self.block_size - end)
        table.extend(self._take() for _ in range(self.blocks_for(end + num_drafts) - len(table)))
        return num_drafts

    def accept(self, sequence: Sequence, accepted: tuple[int, ...]) -> None:
        """Of the guesses these were right: blocks that they fill can be found from now on. Blocks of the
        others are free again, but for the one that the next token goes into."""
        size, table, token_ids = self.block_size, sequence.block_table, [*sequence.token_ids, *accepted]
        if self._is_caching:
            for index in range(sequence.num_tokens // size, len(token_ids) // size):
                self._name(table[index], self._key(sequence, index, token_ids), size)
        while len(table) > self.blocks_for(len(token_ids) + 1):
            self._disown(table.pop())

    def release(self, sequence: Sequence) -> None:
        """Take a sequence's blocks back. Its last ones will be taken first: a prefix without its beginning
        can't be found."""
        for block in reversed(sequence.block_table):
            self._disown(block)
        sequence.block_table.clear()

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The copies (source, destination) that the step has to make before it writes. No destination is a
        source; a source may be written by the step."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    # ------------------------------------------------------------ what is where

    def register(self, sequence: Sequence, end: int) -> None:
        """The sequence's tokens up to `end` will be computed in this step: its full blocks can be found from
        now on, and the last block of a prompt."""
        if not self._is_caching:
            return
        size, table = self.block_size, sequence.block_table
        for index in range(sequence.num_computed_tokens // size, end // size):
            self._name(table[index], self._key(sequence, index, sequence.token_ids), size)
        if end % size and end == sequence.num_prompt_tokens:
            self._name(table[end // size], self._tail_key(sequence), end % size)

    def confirm(self) -> None:
        """The step was computed."""
        self._unconfirmed.clear()

    def rollback(self) -> None:
        """The step was not computed. Who had part in it must be released."""
        for block in self._unconfirmed:
            self._forget(block)
        self._unconfirmed.clear()

    def _find(self, sequence: Sequence) -> list[int]:
        """Blocks with the sequence's next tokens, from the one on in which they begin."""
        found: list[int] = []
        if not (self.is_looked_up(sequence) and sequence.num_pending_tokens > 1):
            return found
        first, num_full = (
            sequence.num_computed_tokens // self.block_size,
            sequence.num_tokens // self.block_size,
        )
        for index in range(first, num_full):
            block = self._found.get(self._key(sequence, index, sequence.token_ids))
            if block is None:
                return found
            found.append(block)
        if sequence.num_tokens % self.block_size and not sequence.num_output_tokens:
            block = self._found.get(self._tail_key(sequence))
            found += [] if block is None else [block]
        return found

    def _key(self, sequence: Sequence, index: int, token_ids: list[int]) -> bytes:
        """Of the sequence's block `index`, which these tokens of it fill."""
        keys, size = sequence.block_keys, self.block_size
        while len(keys) <= index:
            start = len(keys) * size
            keys.append(_chain(self._key_before(sequence, len(keys)), token_ids[start : start + size]))
        return keys[index]

    def _tail_key(self, sequence: Sequence) -> bytes:
        """Of the last block of the prompt, which is not full."""
        index, end = divmod(sequence.num_prompt_tokens, self.block_size)
        start = index * self.block_size
        return _chain(self._key_before(sequence, index), sequence.token_ids[start : start + end])

    def _key_before(self, sequence: Sequence, index: int) -> bytes:
        if index:
            return self._key(sequence, index - 1, sequence.token_ids)
        salt = hashlib.sha256(sequence.request.cache_salt.encode("utf-8", "surrogatepass")).digest()
        return _chain(salt, [sequence.rope_length]) if sequence.rope_length else salt

    def _is_diverging(self, sequence: Sequence) -> bool:
        """Whether the next token would go over what others see in the same block."""
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        if index >= len(sequence.block_table):
            return False
        block = sequence.block_table[index]
        return self._num_owners[block] > 1 and offset >= self._keys[block][1]

    def _name(self, block: int, key: bytes, num_tokens: int) -> None:
        """Let a block be found, unless another with the same tokens is. Where several own it the key stays as
        it is: what has been added since is only one's own."""
        if key not in self._found and self._num_owners[block] == 1:
            self._forget(block)
            self._found[key], self._keys[block] = block, (key, num_tokens)
            self._unconfirmed.append(block)

    def _forget(self, block: int) -> None:
        if block in self._keys:
            key, _ = self._keys.pop(block)
            del self._found[key]

    def _take(self) -> int:
        """A free block for new tokens."""
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._num_owners[block] = 1
        return block

    def _own(self, block: int) -> None:
        self._free.pop(block, None)
        self._num_owners[block] += 1

    def _disown(self, block: int) -> None:
        self._num_owners[block] -= 1
        if not self._num_owners[block]:
            self._free[block] = None
            if block not in self._keys:
                self._free.move_to_end(block, last=False)


def _chain(before: bytes, token_ids: list[int]) -> bytes:
    return hashlib.sha256(before + array("q", token_ids).tobytes()).digest()
