"""SplitMatrix: a matrix whose output channels lie in several places, one below the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.operands import Matrix


class _Parts(NamedTuple):
    on_card: tuple[Matrix, ...]
    in_ram: Matrix | None


class SplitMatrix(_Parts):
    """The first parts lie where the card computes, the last one lies in RAM. Each part is a matrix in the
    same format."""

    @property
    def parts(self) -> tuple[Matrix, ...]:
        return self.on_card if self.in_ram is None else (*self.on_card, self.in_ram)

    @cached_property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    def rows(self, start: int, stop: int) -> SplitMatrix:
        """A view of the output channels from `start` to `stop`."""
        cut, first = list[Matrix](), 0
        for part in self.on_card:
            begin, end = max(start - first, 0), min(stop - first, part.out_features)
            cut += [part.rows(begin, end)] if begin < end else []
            first += part.out_features
        in_ram = None
        if self.in_ram is not None and stop > first:
            in_ram = self.in_ram.rows(max(start - first, 0), stop - first)
        return SplitMatrix(tuple(cut), in_ram)

    def look_up(self, row_ids: Tensor) -> Tensor:
        """Rows (int64 [num_rows]) as float32 [num_rows, in_features], on the host."""
        return self.dequantize()[row_ids.cpu()]

    def map(self, function: Callable[[Tensor], Tensor]) -> SplitMatrix:
        """The matrix with `function` applied to each of its tensors."""
        in_ram = None if self.in_ram is None else self.in_ram.map(function)
        return SplitMatrix(tuple(part.map(function) for part in self.on_card), in_ram)

    def dequantize(self) -> Tensor:
        """The matrix as float32 [out_features, in_features], on the host."""
        return torch.cat([part.map(lambda tensor: tensor.cpu()).dequantize() for part in self.parts])
