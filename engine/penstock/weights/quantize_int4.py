"""Symmetric 4 bits per group of inputs: w ~ (code - 8) * step * unit.

The scales of a row are steps: integers from -15 to 15 times one number, the row's unit (bfloat16, as their
products are). A step times a code then fits INT8, so that kernels multiply the row as INT8
(kernels/cpu/linear/steps.h).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels import Int4Tensor
from penstock.weights.checkpoints.quantized.nibbles import pack

#: Integers go from -8 to 7. The largest weight of a group becomes -8 whatever its sign is, so a scale may be
#: negative. A scale is chosen among these shares of largest / -8, by the least sum of squared errors: a
#: smaller scale cuts off the largest weights and rounds all others finer.
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
LOWEST, HIGHEST = -8, 7
MOST_STEPS = 15


class RowSteps(NamedTuple):
    """What the scales of each row have in common."""

    unit: Tensor  #: float32 [num_rows, 1], with so few bits that bfloat16 holds its multiples
    widest: Tensor  #: int64 [num_rows, 1]: the group whose scale is 15 units, or -15

    def steps(self, scale: Tensor) -> Tensor:
        """The steps of scales that are whole units, [num_rows, num_groups]: int8."""
        return torch.where(self.unit > 0, scale / self.unit, 0).round_().to(torch.int8)


def row_steps(weight: Tensor, group_size: int) -> RowSteps:
    """The unit of each row of [num_rows, in_features] in float32: fifteen of them are near the largest scale
    that the row's groups would have without units. Raises ValueError for NaN or infinity."""
    groups = weight.reshape(weight.shape[0], -1, group_size)
    largest, widest = _best_scales(groups, None, 0).abs().max(1, keepdim=True)
    bits = (largest / MOST_STEPS).view(torch.int32)
    return RowSteps(((bits + (1 << 19)) & -(1 << 20)).view(torch.float32), widest)  # 4 bits of 24 stay


def choose_scales(weight: Tensor, group_size: int, rows: RowSteps, first: int = 0) -> Tensor:
    """The scale of each group of [num_rows, num_groups * group_size] in float32, of which the first is the
    row's group `first`: bfloat16 [num_rows, num_groups]. A group of zeros gets scale 0. Raises ValueError for
    NaN or infinity."""
    return _best_scales(weight.reshape(weight.shape[0], -1, group_size), rows, first).bfloat16()


def _best_scales(groups: Tensor, rows: RowSteps | None, first: int) -> Tensor:
    """Scales of [num_rows, num_groups, group_size]; without `rows`, any numbers."""
    low, high = torch.aminmax(groups, dim=-1)
    whole = torch.where(high > -low, high, low) / LOWEST
    if not bool(torch.isfinite(whole).all()):
        raise ValueError("the matrix holds NaN or infinite values")
    best, least = torch.zeros_like(whole), torch.full_like(whole, torch.inf)
    for share in SHARES:
        scale = whole * share if rows is None else _in_steps(whole * share, rows, first)
        error = (groups - _integers(groups, scale[..., None]).mul_(scale[..., None])).square_().sum(-1)
        is_better = error < least
        best, least = torch.where(is_better, scale, best), torch.where(is_better, error, least)
    return best


def _in_steps(scale: Tensor, rows: RowSteps, first: int) -> Tensor:
    """The nearest numbers of whole units, and only 0 becomes 0."""
    steps = torch.where(rows.unit > 0, scale / rows.unit, 0).round_()
    steps = torch.where(steps == 0, scale.sign(), steps).clamp_(-MOST_STEPS, MOST_STEPS)
    is_widest = torch.arange(first, first + scale.shape[1]) == rows.widest
    return torch.where(is_widest, MOST_STEPS * scale.sign(), steps) * rows.unit


def round_to_codes(weight: Tensor, scale: Tensor) -> Tensor:
    """The codes (uint8, 0 to 15) nearest to weight / scale; half rounds to even. The shapes must
    broadcast."""
    return (_integers(weight, scale) - LOWEST).to(torch.uint8)


def quantize_int4(weight: Tensor, group_size: int) -> Int4Tensor:
    """[out_features, in_features] of any floating dtype. Raises ValueError for NaN or infinity."""
    exact = weight.float()
    rows = row_steps(exact, group_size)
    scale = choose_scales(exact, group_size, rows)
    codes = round_to_codes(exact, scale.repeat_interleave(group_size, 1))
    return Int4Tensor(pack(codes), rows.unit.bfloat16(), group_size, sub_scale=rows.steps(scale))


def _integers(weight: Tensor, scale: Tensor) -> Tensor:
    divisor = torch.where(scale != 0, scale.float(), torch.inf)
    return torch.div(weight, divisor).round_().clamp_(LOWEST, HIGHEST)


class Int4RowQuantizer:
    """quantize_int4() for one chunk of a matrix after the other."""

    def __init__(self) -> None:
        self._exact = torch.empty(0)

    def quantize(self, weight: Tensor, out: Int4Tensor) -> None:
        """quantize_int4() into `out`."""
        self._exact = weight.float()
        made = quantize_int4(self._exact, out.group_size)
        assert out.sub_scale is not None and made.sub_scale is not None
        out.codes.copy_(made.codes)
        out.scale.copy_(made.scale)
        out.sub_scale.copy_(made.sub_scale)

    def loss(self, out: Int4Tensor) -> tuple[float, float]:
        """Sums of squares: of what was lost when the last chunk was quantized to `out`, and of the chunk."""
        lost = torch.linalg.vector_norm(self._exact - out.dequantize(), dtype=torch.float64)
        return float(lost) ** 2, float(torch.linalg.vector_norm(self._exact, dtype=torch.float64)) ** 2
