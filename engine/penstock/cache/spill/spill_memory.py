"""SpillMemory: the host's memory beside a card, in which blocks lie that have no room on the card."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from penstock.cache.spill.spill_file import Place
from penstock.memory.lane import Link, Memory


class SpillMemory:
    """One piece of memory. The lane that it belongs to gives it back."""

    def __init__(self, num_bytes: int, memory: Memory, link: Link) -> None:
        """`num_bytes` are whole pages. `memory` is the one that feeds the card over `link`."""
        self.buffer = memory.allocate(num_bytes)
        memory.prepare(self.buffer)
        self.link = link

    def begin_read(self, places: Iterable[Place]) -> list[Future[int]]:
        """Copy bytes from each offset of the buffer to a tensor (uint8) on the host. The copies are done when
        this returns, so there is no future to wait for. Between two steps alone: a step's own copies have
        ended then."""
        for offset, target in places:
            target.copy_(self.buffer[offset : offset + target.numel()])
        return []

    def write(self, places: Sequence[Place]) -> None:
        """Copy each tensor (uint8, on the host) to its offset in the buffer, between two steps alone."""
        for offset, source in places:
            self.buffer[offset : offset + source.numel()].copy_(source)

    def close(self) -> None: ...
