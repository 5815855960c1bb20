"""Which splits of a sequence's keys the processor attends to where they lie, in RAM beside a card. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

#: Keys of a split: as the card's kernels cut a sequence (cuda/attention.cu).
SPLIT_KEYS = 256
#: The most dimensions of a head, and the most bytes of partial results of a step (cuda/attention.py).
MOST_DIM, MOST_PARTIAL_BYTES = 256, 16 << 20
#: Inputs and results of a step that cross: less than a crossing has room for.
MOST_FLOATS = 1_000_000


def ram_share(memory_gbps: float, link_gbps: float) -> float:
    """The share of the keys and values in RAM that the processor reads while the link brings the others, if
    both are to end at the same time. Both read the same RAM, whose rate is memory_gbps. 0 if a rate is not
    known: what is not measured is not taken."""
    if memory_gbps <= 0 or link_gbps <= 0:
        return 0.0
    return max(0.0, 1.0 - link_gbps / memory_gbps)


class AttendsInRam(NamedTuple):
    """The processor attends to a share of the splits in RAM, and the link brings the others."""

    share: float
    num_heads: int
    head_dim: int
    #: With fewer splits in RAM, a step brings all of them: they come while products are computed, and
    #: attention stands between two products.
    least_splits: int = 1

    @classmethod
    def of(cls, heads: tuple[int, int] | None, block_size: int, share: float) -> AttendsInRam | None:
        """`heads` are ModelFootprint.attended_heads. None where the card attends to all of them."""
        if heads is None or heads[1] > MOST_DIM or SPLIT_KEYS % block_size or share <= 0:
            return None
        return cls(share, *heads)

    def room(self, num_tokens: int, num_splits: int) -> int:
        """How many splits of all of a step's tokens may be in RAM; num_splits are the most of a sequence. 0
        in steps with many tokens: their keys and values are worth bringing once for all of them, and the card
        attends faster."""
        row = self.num_heads * (self.head_dim + 2)
        if num_tokens < 1 or 4 * num_tokens * num_splits * row > MOST_PARTIAL_BYTES:
            return 0
        left = MOST_FLOATS - num_tokens * self.num_heads * self.head_dim
        return max(0, left // row // num_tokens * num_tokens)

    def num_asked(self, num_splits: int) -> int:
        """To how many of so many splits the processor attends, if there is room for all of these."""
        return round(self.share * num_splits) if num_splits >= self.least_splits else 0


class SpilledKeys(NamedTuple):
    """Keys and values of a step's sequences that lie elsewhere. Bytes are those of all layers."""

    #: What the step reads and writes there, if the processor attends to none of it.
    num_bytes: int = 0
    attends: AttendsInRam | None = None
    #: Splits to which the processor may attend, of all sequences: pairs of their number and the bytes of one.
    #: Layers with one view of the past have one pair.
    splits: tuple[tuple[int, int], ...] = ()
    num_seqs: int = 1
    #: All splits of the longest sequence.
    most_splits: int = 0

    @classmethod
    def of_one(
        cls, num_spilled: int, num_tokens: int, token_bytes: int, attends: AttendsInRam | None
    ) -> SpilledKeys:
        """Those of a sequence of num_tokens tokens, of which num_spilled lie elsewhere, and all layers see
        all."""
        splits = (num_spilled // SPLIT_KEYS, SPLIT_KEYS * token_bytes)
        return cls(num_spilled * token_bytes, attends, (splits,), 1, -(-num_tokens // SPLIT_KEYS))

    def parts(self, num_tokens: int) -> tuple[int, int]:
        """The bytes that are moved, and those to which the processor attends where they lie, in a step of so
        many tokens, divided evenly among the sequences. A split of several sequences counts for each."""
        if self.attends is None:
            return self.num_bytes, 0
        of_each = max(1, -(-num_tokens // max(1, self.num_seqs)))
        room = self.attends.room(num_tokens, self.most_splits) // of_each
        attended = sum(size * min(room, self.attends.num_asked(number)) for number, size in self.splits)
        return max(0, self.num_bytes - attended), attended


def splits_in_ram(
    table: Sequence[int],
    num_past: int,
    first_seen: int,
    block_size: int,
    num_resident: int,
    written: Container[int],
) -> Iterator[int]:
    """The splits that are whole, of keys that were computed before the step, and lie in RAM: the blocks of
    the sequence from num_resident on, without those that the step writes. `first_seen`: the first key that
    the sequence's first token of the step sees."""
    size = SPLIT_KEYS // block_size
    for split in range(first_seen // SPLIT_KEYS, num_past // SPLIT_KEYS):
        blocks = table[split * size : (split + 1) * size]
        if all(block >= num_resident and block not in written for block in blocks):
            yield split


NOTHING_SPILLED = SpilledKeys()
