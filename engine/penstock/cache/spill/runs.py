"""Runs of blocks that lie side by side. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def runs(blocks: Iterable[int], max_gap: int = 0) -> tuple[range, ...]:
    """The blocks, in rising order, as ranges. Blocks with at most `max_gap` others between them share a
    range: reading a few bytes too many takes less time than a second read."""
    found: list[range] = []
    for block in blocks:
        if found and block <= found[-1].stop + max_gap:
            found[-1] = range(found[-1].start, block + 1)
        else:
            found.append(range(block, block + 1))
    return tuple(found)
