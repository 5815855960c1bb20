"""Adapter: the weights of a LoRA adapter in memory, for one model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from penstock.kernels import LowRank
from penstock.weights.adapters.adapted import Adapted
from penstock.weights.layer_weights import LayerWeights

#: The shares of a layer's matrices by their names.
LayerShares = Mapping[str, LowRank]


@dataclass(frozen=True, eq=False)
class Adapter:
    """A request holds its adapter, so that nothing is freed before the request ends."""

    name: str
    folder: str
    #: By stack and number of the layer in it.
    layers: Mapping[tuple[str, int], LayerShares] = field(repr=False)

    @cached_property
    def num_bytes(self) -> int:
        return sum(share.num_bytes for layer in self.layers.values() for share in layer.values())

    @cached_property
    def digest(self) -> bytes:
        """Stands for all its numbers: requests with equal adapters may share keys and values."""
        digest = hashlib.sha256()
        for place, layer in sorted(self.layers.items()):
            for name, share in sorted(layer.items()):
                facts = [(part.first_rank, part.first_output, part.num_outputs) for part in share.parts]
                digest.update(repr((place, name, share.a.shape, facts)).encode())
                for tensor in share.arrays:
                    digest.update(tensor.numpy().data)
        return digest.digest()


@dataclass(frozen=True)
class StepAdapters:
    """Which rows of a step have which adapter."""

    num_rows: int
    rows: torch.Tensor  # as in Adapted
    groups: tuple[tuple[Adapter, int, int], ...]

    @classmethod
    def of(cls, runs: Sequence[tuple[Adapter | None, int]]) -> StepAdapters | None:
        """Of runs of rows (adapter, number of rows) in the order of the step; None if none has an adapter."""
        places: dict[Adapter, list[int]] = {}
        num_rows = 0
        for adapter, count in runs:
            if adapter is not None:
                places.setdefault(adapter, []).extend(range(num_rows, num_rows + count))
            num_rows += count
        if not places:
            return None
        groups, rows = list[tuple[Adapter, int, int]](), list[int]()
        for adapter, own in places.items():
            groups.append((adapter, len(rows), len(rows) + len(own)))
            rows += own
        return cls(num_rows, torch.tensor(rows), tuple(groups))

    def onto(self, weights: LayerWeights, stack: str, index: int) -> LayerWeights:
        """The weights of layer `index` of a stack, with what the adapters add to their products."""
        groups = tuple(
            (layer, first, end)
            for adapter, first, end in self.groups
            if (layer := adapter.layers.get((stack, index)))
        )
        return weights.adapted_by(Adapted(self.num_rows, self.rows, groups)) if groups else weights
