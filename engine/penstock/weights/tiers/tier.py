"""What a tier gives, and what fills it: the words that tiers and readers share."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from penstock.memory.reads.ordered_reads import OrderedRead
from penstock.spec import UnitKey
from penstock.weights.layer_weights import LayerWeights


class UnitReader(Protocol):
    """Brings units into a tier, on threads of its own."""

    def submit(self, key: UnitKey, buffer: Tensor) -> Future[int]:
        """Fill `buffer` (whole pages) with a unit; the result is the number of bytes read."""

    def close(self) -> None:
        """End the threads. The caller waits first for the reads that it submitted."""


@runtime_checkable
class OrderingReader(UnitReader, Protocol):
    """A reader that can bring one unit after the other."""

    def can_order(self, keys: Iterable[UnitKey]) -> bool:
        """Whether submit_ordered() can bring every one of these units."""

    def submit_ordered(self, key: UnitKey, buffer: Tensor) -> OrderedRead:
        """What submit() does, after all reads that were ordered before."""


@dataclass(slots=True, eq=False)
class Arrival:
    """A unit in memory, or on its way there."""

    buffer: Tensor
    read: Future[int] | OrderedRead
    #: The staging slot; None if the unit has a buffer of its own.
    slot: int | None
    is_lent: bool = False
    #: Who computes with the unit in this memory, beside a tier above that takes it from here.
    num_users: int = 0
    #: The unit's weights, for when it is lent again.
    views: LayerWeights | None = None
    #: The unit was lent, so that its read has ended well.
    is_there: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether reading has ended, well or not."""
        return self.is_there or self.read.done()

    @property
    def has_failed(self) -> bool:
        return not self.is_there and self.read.done() and self.read.exception() is not None


class Tier(Protocol):
    """What the tier above takes units from."""

    @property
    def num_slots(self) -> int: ...

    def acquire(self, key: UnitKey) -> Arrival:
        """Wait for a unit; the unit stays until it is released. Raises what reading raised."""

    def release(self, key: UnitKey) -> None: ...

    def close(self) -> None: ...
