"""Symmetric 4 bits per group of inputs: w ~ (code - 8) * scale, with scales in bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels import Int4Tensor

#: Integers go from -8 to 7. The largest weight of a group becomes -8 whatever its sign is, so a scale may be
#: negative. A scale is chosen among these shares of largest / -8, by the least sum of squared errors: a
#: smaller scale cuts off the largest weights and rounds all others finer.
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
LOWEST, HIGHEST = -8, 7


def choose_scales(weight: Tensor, group_size: int) -> Tensor:
    """The scale of each group of [num_rows, in_features] in float32: bfloat16 [num_rows, num_groups]. A group
    of zeros gets scale 0. Raises ValueError for NaN or infinity."""
    groups = weight.reshape(weight.shape[0], -1, group_size)
    low, high = torch.aminmax(groups, dim=-1)
    whole = torch.where(high > -low, high, low) / LOWEST
    if not bool(torch.isfinite(whole).all()):
        raise ValueError("the matrix holds NaN or infinite values")
    best = torch.zeros_like(whole, dtype=torch.bfloat16)
    least = torch.full_like(whole, torch.inf)
    for share in SHARES:
        scale = (whole * share).to(torch.bfloat16)
        error = (
            (groups - _integers(groups, scale[..., None]).mul_(scale[..., None].float())).square_().sum(-1)
        )
        is_better = error < least
        best, least = torch.where(is_better, scale, best), torch.where(is_better, error, least)
    return best


def round_to_codes(weight: Tensor, scale: Tensor) -> Tensor:
    """The codes (uint8, 0 to 15) nearest to weight / scale; half rounds to even. The shapes must
    broadcast."""
    return (_integers(weight, scale) - LOWEST).to(torch.uint8)


def pack(codes: Tensor) -> Tensor:
    """Codes as uint8 [..., in_features] -> two in a byte, the first in the low half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def quantize_int4(weight: Tensor, group_size: int) -> Int4Tensor:
    """[out_features, in_features] of any floating dtype. Raises ValueError for NaN or infinity."""
    exact = weight.float()
    scale = choose_scales(exact, group_size)
    codes = round_to_codes(exact, scale.repeat_interleave(group_size, 1))
    return Int4Tensor(pack(codes), scale, group_size)


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
        out.codes.copy_(made.codes)
        out.scale.copy_(made.scale)

    def loss(self, out: Int4Tensor) -> tuple[float, float]:
        """Sums of squares: of what was lost when the last chunk was quantized to `out`, and of the chunk."""
        lost = torch.linalg.vector_norm(self._exact - out.dequantize(), dtype=torch.float64)
        return float(lost) ** 2, float(torch.linalg.vector_norm(self._exact, dtype=torch.float64)) ** 2
