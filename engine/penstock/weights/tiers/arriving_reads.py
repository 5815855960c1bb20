"""ArrivingReads: the reads of experts that were lent before they are there, for the kernels that compute
them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from penstock.memory.reads.ordered_reads import OrderedRead


class ArrivingReads:
    """Arriving of the kernels. At least one read."""

    def __init__(self, reads: Sequence[OrderedRead]) -> None:
        self._own = reads
        self._all = reads[0].reads
        self.wait, self.reads = self._all.wait_address, self._all.address
        self._waited_before_s, self._waited_here_s = self._all.waited_s, 0.0

    def __len__(self) -> int:
        return len(self._own)

    def tickets(self) -> list[int]:
        return [read.ticket for read in self._own]

    def settle(self, index: int) -> None:
        started = time.perf_counter()
        self._own[index].result()
        self._waited_here_s += time.perf_counter() - started

    @property
    def waited_s(self) -> float:
        """Seconds for which the user of these reads waited."""
        return self._all.waited_s - self._waited_before_s + self._waited_here_s
