"""Which splits of a sequence's keys the processor attends to where they lie, in RAM beside a card. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

#: Keys of a split: as the card's kernels cut a sequence (cuda/attention.cu).
SPLIT_KEYS = 256


def ram_share(memory_gbps: float, link_gbps: float) -> float:
    """The share of the keys and values in RAM that the processor reads while the link brings the others, if
    both are to end at the same time. Both read the same RAM, whose rate is memory_gbps. 0 if a rate is not
    known: what is not measured is not taken."""
    if memory_gbps <= 0 or link_gbps <= 0:
        return 0.0
    return max(0.0, 1.0 - link_gbps / memory_gbps)


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
