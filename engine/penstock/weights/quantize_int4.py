"""Symmetric codes per group of inputs, of 4, 3 or 2 bits: w ~ (code - zero) * step * unit.

The scales of a row are steps: small integers times one number, the row's unit (bfloat16, as the products of
4-bit codes are). A step times a code then fits INT8, so that kernels multiply the row as INT8
(kernels/cpu/linear/steps.h, low_codes.h).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels import Int4Tensor
from penstock.kernels.low_codes import MOST_STEPS, pack_low
from penstock.weights.checkpoints.quantized.nibbles import pack


@dataclass(frozen=True)
class Code:
    """What codes of some bits stand for: integers from `lowest` on. The largest weight of a group becomes the
    lowest one whatever its sign is, so a scale may be negative. A scale is chosen among shares of largest /
    lowest, by the least sum of squared errors: a smaller scale cuts off the largest weights and rounds all
    others finer."""

    bits: int
    most_steps: int
    shares: tuple[float, ...]
    #: Whether each share is tried with the other sign as well, which reaches less far.
    has_signs: bool = False

    @property
    def lowest(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def highest(self) -> int:
        return -self.lowest - 1

    @property
    def codebook(self) -> str:
        return "signed" if self.bits == 4 else f"int{self.bits}"

    @property
    def has_widest(self) -> bool:
        """Whether a row's largest scale is the largest step, so that other tools' scales tell the unit."""
        return self.bits == 4

    def pack(self, codes: Tensor) -> Tensor:
        """uint8 [rows, in_features] as Int4Tensor has them."""
        return pack(codes) if self.bits == 4 else pack_low(codes, self.bits)


#: By the name of a codebook. Fewer bits gain more by a search: 18 to 25 % of the errors' size at 2 bits.
CODES = {
    code.codebook: code
    for code in (
        Code(4, 15, (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)),
        Code(3, MOST_STEPS[3], (1.0, 0.9, 0.8, 0.7, 0.6, 0.5), has_signs=True),
        Code(2, MOST_STEPS[2], (1.05, 0.91, 0.77, 0.63, 0.49, 0.35), has_signs=True),
    )
}
INT4 = CODES["signed"]


class RowSteps(NamedTuple):
    """What the scales of each row have in common."""

    unit: Tensor  #: float32 [num_rows, 1], with so few bits that bfloat16 holds it (and its multiples)
    widest: Tensor  #: int64 [num_rows, 1]: the group whose scale has the most steps

    def steps(self, scale: Tensor) -> Tensor:
        """The steps of scales that are whole units, [num_rows, num_groups]: int8."""
        return torch.where(self.unit > 0, scale / self.unit, 0).round_().to(torch.int8)


def row_steps(weight: Tensor, group_size: int, code: Code = INT4) -> RowSteps:
    """The unit of each row of [num_rows, in_features] in float32: the most steps are near the largest scale
    that the row's groups would have without units. Raises ValueError for NaN or infinity."""
    groups = weight.reshape(weight.shape[0], -1, group_size)
    largest, widest = _best_scales(groups, None, 0, code).abs().max(1, keepdim=True)
    bits = (largest / code.most_steps).view(torch.int32)
    left = 20 if code.has_widest else 16  # of 24 bits, 4 or 8 stay
    return RowSteps(((bits + (1 << (left - 1))) & -(1 << left)).view(torch.float32), widest)


def choose_scales(
    weight: Tensor, group_size: int, rows: RowSteps, first: int = 0, code: Code = INT4
) -> Tensor:
    """The scale of each group of [num_rows, num_groups * group_size] in float32, of which the first is the
    row's group `first`: float32 [num_rows, num_groups], whole units. A group of zeros gets scale 0. Raises
    ValueError for NaN or infinity."""
    return _best_scales(weight.reshape(weight.shape[0], -1, group_size), rows, first, code)


def _best_scales(groups: Tensor, rows: RowSteps | None, first: int, code: Code) -> Tensor:
    """Scales of [num_rows, num_groups, group_size]; without `rows`, any numbers."""
    low, high = torch.aminmax(groups, dim=-1)
    whole = torch.where(high > -low, high, low) / code.lowest
    if not bool(torch.isfinite(whole).all()):
        raise ValueError("the matrix holds NaN or infinite values")
    best, least = torch.zeros_like(whole), torch.full_like(whole, torch.inf)
    for share in (*code.shares, *(-share for share in code.shares if code.has_signs)):
        scale = whole * share if rows is None else _in_steps(whole * share, rows, first, code)
        error = (groups - _integers(groups, scale[..., None], code).mul_(scale[..., None])).square_().sum(-1)
        is_better = error < least
        best, least = torch.where(is_better, scale, best), torch.where(is_better, error, least)
    return best


def _in_steps(scale: Tensor, rows: RowSteps, first: int, code: Code) -> Tensor:
    """The nearest numbers of whole units, and only 0 becomes 0."""
    most = code.most_steps
    steps = torch.where(rows.unit > 0, scale / rows.unit, 0).round_()
    steps = torch.where(steps == 0, scale.sign(), steps).clamp_(-most, most)
    if code.has_widest:
        is_widest = torch.arange(first, first + scale.shape[1]) == rows.widest
        steps = torch.where(is_widest, most * scale.sign(), steps)
    return steps * rows.unit


def round_to_codes(weight: Tensor, scale: Tensor, code: Code = INT4) -> Tensor:
    """The codes (uint8, from 0 on) nearest to weight / scale; half rounds to even. The shapes must
    broadcast."""
    return (_integers(weight, scale, code) - code.lowest).to(torch.uint8)


def quantize_int4(weight: Tensor, group_size: int, code: Code = INT4) -> Int4Tensor:
    """[out_features, in_features] of any floating dtype. Raises ValueError for NaN or infinity."""
    exact = weight.float()
    rows = row_steps(exact, group_size, code)
    scale = choose_scales(exact, group_size, rows, code=code)
    codes = code.pack(round_to_codes(exact, scale.repeat_interleave(group_size, 1), code))
    return Int4Tensor(codes, rows.unit.bfloat16(), group_size, code.codebook, sub_scale=rows.steps(scale))


def _integers(weight: Tensor, scale: Tensor, code: Code) -> Tensor:
    divisor = torch.where(scale != 0, scale.float(), torch.inf)
    return torch.div(weight, divisor).round_().clamp_(code.lowest, code.highest)


class Int4RowQuantizer:
    """quantize_int4() for one chunk of a matrix after the other."""

    def __init__(self) -> None:
        self._exact = torch.empty(0)

    def quantize(self, weight: Tensor, out: Int4Tensor) -> None:
        """quantize_int4() into `out`."""
        self._exact = weight.float()
        made = quantize_int4(self._exact, out.group_size, CODES[out.codebook])
        assert out.sub_scale is not None and made.sub_scale is not None
        out.codes.copy_(made.codes)
        out.scale.copy_(made.scale)
        out.sub_scale.copy_(made.sub_scale)

    def loss(self, out: Int4Tensor) -> tuple[float, float]:
        """Sums of squares: of what was lost when the last chunk was quantized to `out`, and of the chunk."""
        lost = torch.linalg.vector_norm(self._exact - out.dequantize(), dtype=torch.float64)
        return float(lost) ** 2, float(torch.linalg.vector_norm(self._exact, dtype=torch.float64)) ** 2
