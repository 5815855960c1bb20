"""LayerRun: layers that follow each other, with what a step computes in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

from torch import Tensor

from penstock.kernels import BatchLayout, LayerKV
from penstock.weights.layer_weights import LayerWeights


class LayerRun(NamedTuple):
    """The arguments of Family.layers(), but for the hidden states."""

    indices: Sequence[int]
    weights: Sequence[LayerWeights]
    caches: Sequence[LayerKV]
    batch: BatchLayout
    #: Called between two calls of the kernels; what it raises ends the step.
    go_on: Callable[[], object]

    def part(self, first: int, end: int) -> LayerRun:
        """Some of the layers."""
        own = slice(first, end)
        return self._replace(indices=self.indices[own], weights=self.weights[own], caches=self.caches[own])


class LayersCall(Protocol):
    """What computes layers of one kind together."""

    def __call__(self, run: LayerRun, hidden: Tensor) -> Tensor | None:
        """The hidden states after the layers. None: nothing was computed."""


def computed(
    run: LayerRun,
    hidden: Tensor,
    calls: Sequence[LayersCall | None],
    layer: Callable[[int, LayerWeights, Tensor, LayerKV, BatchLayout], Tensor],
) -> Tensor | None:
    """The hidden states after a run of which layers of one kind that follow each other have one call. Layers
    without a call come one by one. None: nothing was computed, and all layers have to come one by one."""
    for call, first, end in _groups(calls):
        part = run.part(first, end)
        together = None if call is None else call(part, hidden)
        if together is None and end - first == len(calls):
            return None
        if together is not None:
            hidden = together
        else:
            for index, weights, kv in zip(part.indices, part.weights, part.caches, strict=True):
                hidden = layer(index, weights, hidden, kv, run.batch)
                run.go_on()
        if end < len(calls):
            run.go_on()
    return hidden


def _groups(calls: Sequence[LayersCall | None]) -> Iterator[tuple[LayersCall | None, int, int]]:
    first = 0
    for call, members in groupby(calls):
        end = first + sum(1 for _ in members)
        yield call, first, end
        first = end
