"""ExpertTable: which experts of a layer are in memory, for compiled kernels that look for them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.kernels.expert_records import ExpertRecord
from penstock.kernels.sublayers.mixture_layer import ExpertsForRun
from penstock.spec import UnitKey

if TYPE_CHECKING:
    from penstock.weights.layer_weights import LayerWeights


class ExpertTable:
    """Where the weights of one layer's experts are, if the experts have gates. Whoever computes by the
    addresses keeps the table, which keeps the weights."""

    def __init__(self, num_experts: int) -> None:
        self._weights: list[LayerWeights | None] = [None] * num_experts
        #: The addresses of the experts' records (ExpertRecord); 0: not in memory.
        self._addresses = array("q", bytes(8 * num_experts))
        #: Where the addresses lie, for good.
        self.address = self._addresses.buffer_info()[0]

    def put(self, number: int, weights: LayerWeights, record: ExpertRecord) -> None:
        """An expert is in memory, with this record of its weights."""
        self._weights[number] = weights
        self._addresses[number] = record.address

    def keeps(self, number: int) -> bool:
        """Whether put() was called for an expert that is in memory."""
        return self._weights[number] is not None

    def __contains__(self, number: int) -> bool:
        """Whether an expert is in memory: somebody has put it, or compiled kernels have."""
        return self._addresses[number] != 0

    def remove(self, number: int) -> None:
        """An expert leaves the memory."""
        self._addresses[number] = 0
        self._weights[number] = None


@dataclass(frozen=True)
class ExpertRun:
    """A layer's experts for kernels that find them by themselves, in several layers after each other."""

    table: ExpertTable
    #: No expert leaves the memory from here on.
    begin: Callable[[], ExpertsForRun]
    #: Until here. Takes the layers that asked for experts which were there, each with the experts' numbers.
    end: Callable[[Sequence[tuple[UnitKey, Sequence[int]]]], None]
    layer: UnitKey
