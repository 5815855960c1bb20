"""Adapted: what the adapters of a step's requests add to the products of one layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels import Kernels, LowRank


@dataclass(frozen=True)
class Adapted:
    """Valid for products of all `num_rows` rows of a step."""

    num_rows: int
    #: Numbers of the rows with an adapter, int64. Those of one adapter lie side by side, in their order.
    rows: Tensor
    #: For each adapter its shares of the layer's matrices by their names, and its places in `rows`.
    groups: tuple[tuple[Mapping[str, LowRank], int, int], ...]

    def add(self, kernels: Kernels, name: str, x: Tensor, y: Tensor) -> None:
        """Adds to y, which is the product of x [num_rows, in_features] and the matrix `name`."""
        assert len(x) == self.num_rows, f"{len(x)} rows in a step of {self.num_rows}"
        shares = [(layer[name], first, end) for layer, first, end in self.groups if name in layer]
        if shares:
            kernels.adapters.add(x, y, self.rows, shares)

    def part(self, first: int, end: int) -> Adapted:
        """For products of rows first:end of these."""
        is_inside = (self.rows >= first) & (self.rows < end)
        before = [0, *is_inside.cumsum(0).tolist()]
        groups = tuple((layer, before[start], before[stop]) for layer, start, stop in self.groups)
        return Adapted(end - first, self.rows[is_inside] - first, groups)
