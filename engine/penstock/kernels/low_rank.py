"""LowRank: what an adapter (LoRA, arXiv 2106.09685) adds to one product, y += B (scale * (A x)). PlainLowRank
computes it row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.nn.functional import pad

#: Ranks of A and outputs of B that lie side by side (SHARE_RANKS and SHARE_OUTPUTS of cpu/low_rank.h).
BLOCK_RANKS, BLOCK_OUTPUTS = 16, 64
#: Most ranks of a part (MOST_RANKS of cpu/low_rank.h).
MAX_RANK = 256


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

    a: Tensor  # float16 [num_blocks, in_features, BLOCK_RANKS]
    scales: Tensor  # float32 [num_blocks * BLOCK_RANKS]
    parts: tuple[LowRankPart, ...]

    @classmethod
    def of(cls, a: Tensor, scales: Tensor, parts: tuple[LowRankPart, ...]) -> LowRank:
        """From float16 [rank, in_features] and float32 [rank]."""
        rank, num_inputs = a.shape
        missing = -rank % BLOCK_RANKS
        blocks = pad(a, (0, 0, 0, missing)).view(-1, BLOCK_RANKS, num_inputs).transpose(1, 2).contiguous()
        return cls(blocks, pad(scales, (0, missing)), parts)

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """In the order in which a product reads them."""
        return self.scales, self.a, *(part.b for part in self.parts)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def map(self, function: Callable[[Tensor], Tensor]) -> LowRank:
        """What `function` makes of each array, in their order."""
        scales, a = function(self.scales), function(self.a)
        return LowRank(a, scales, tuple(part._replace(b=function(part.b)) for part in self.parts))

    @cached_property
    def native(self) -> tuple[int, int, int]:
        """The first numbers of its low_rank_share in cpu/low_rank.h."""
        return self.a.data_ptr(), self.scales.data_ptr(), len(self.a)

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
                inner = (a * x[row].double()[:, None]).sum(1).flatten() * scales
                for part in share.parts:
                    ranks = inner[part.first_rank : part.first_rank + part.b.shape[1]]
                    added = (part.b.double() * ranks[:, None]).sum(1).flatten()[: part.num_outputs]
                    y[row, part.first_output : part.first_output + part.num_outputs] += added.float()
