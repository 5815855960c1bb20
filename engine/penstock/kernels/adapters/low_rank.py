"""LowRank: what an adapter (LoRA, arXiv 2106.09685) adds to one product, y += B (scale * (A x)). PlainLowRank
computes it row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.nn.functional import pad

#: Outputs of B that lie side by side (LOW_RANK_OUTPUTS of cpu/low_rank.h).
BLOCK_OUTPUTS = 64


class LowRankPart(NamedTuple):
    """B of some of the outputs, made of some of the ranks."""

    b: Tensor  # float16 [num_blocks, rank, BLOCK_OUTPUTS]
    first_rank: int
    first_output: int
    num_outputs: int

    @classmethod
    def of(cls, b: Tensor, first_rank: int, first_output: int) -> LowRankPart:
        """From float16 [num_outputs, rank]."""
        num_outputs, rank = b.shape
        rows = pad(b, (0, 0, 0, -num_outputs % BLOCK_OUTPUTS))
        blocks = rows.view(-1, BLOCK_OUTPUTS, rank).transpose(1, 2).contiguous()
        return cls(blocks, first_rank, first_output, num_outputs)


@dataclass(frozen=True, eq=False)
class LowRank:
    """An adapter's share of one matrix. A matrix of several modules (q, k and v, for instance) has a part for
    each module that is adapted, and the ranks of all parts lie one after the other."""

    a: Tensor  # float16 [rank, in_features]
    scales: Tensor  # float32 [rank]
    parts: tuple[LowRankPart, ...]

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.scales.nbytes + sum(part.b.nbytes for part in self.parts)

    @cached_property
    def native(self) -> tuple[int, int, int]:
        """The first numbers of its low_rank_share in cpu/low_rank.h."""
        return self.a.data_ptr(), self.scales.data_ptr(), self.a.shape[0]

    @cached_property
    def native_parts(self) -> tuple[tuple[int, int, int, int, int], ...]:
        """Its low_rank_part's in cpu/low_rank.h, without the number of the share."""
        return tuple(
            (part.b.data_ptr(), part.first_rank, part.b.shape[1], part.first_output, part.num_outputs)
            for part in self.parts
        )


#: An adapter's share, and the places first:end in the list of rows that have the adapter.
Share = tuple[LowRank, int, int]


class LowRankKernels(Protocol):
    """Arithmetic of adapters."""

    def add(self, x: Tensor, y: Tensor, rows: Tensor, shares: Sequence[Share]) -> None:
        """Adds to y [num_rows, out_features] what adapters make of x [num_rows, in_features]. `rows` int64
        has numbers of rows; those of one share lie side by side. Each bit of a row of y depends on this row
        alone."""


class PlainLowRank:
    """The sums in float64, one row at a time, so that a row meets the same shapes in any company."""

    def add(self, x: Tensor, y: Tensor, rows: Tensor, shares: Sequence[Share]) -> None:
        for share, first, end in shares:
            a, scales = share.a.double(), share.scales.double()
            for row in rows[first:end].tolist():
                inner = (a @ x[row].double()) * scales
                for part in share.parts:
                    ranks = inner[part.first_rank : part.first_rank + part.b.shape[1]]
                    added = (part.b.double() * ranks[:, None]).sum(1).flatten()[: part.num_outputs]
                    y[row, part.first_output : part.first_output + part.num_outputs] += added.float()
