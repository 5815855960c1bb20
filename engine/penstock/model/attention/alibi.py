"""ALiBi: attention with linear biases (arXiv 2108.12409)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def alibi_slopes(num_heads: int, largest: float = 8.0) -> Tensor:
    """float32 [num_heads]. n heads have the slopes 2^(-l/n), 2^(-2l/n), ..., 2^-l if n is a power of two,
    where l is `largest`. Otherwise the first heads have the slopes of the next lower power of two, and the
    others have every second slope of the next higher one."""
    lower = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-largest * (i + 1) / lower) for i in range(lower)]
    slopes += [2 ** (-largest / 2 * (2 * i + 1) / lower) for i in range(num_heads - lower)]
    return torch.tensor(slopes, dtype=torch.float32)
