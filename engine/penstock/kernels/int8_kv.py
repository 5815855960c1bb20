"""INT8 keys and values: the definition of their codes and scales, which all kernels have bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

#: The largest code.
LIMIT = 127.0
#: A scale below the smallest normal float32 has too few bits to divide by: the vector counts as zero.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def quantize_kv(x: Tensor) -> tuple[Tensor, Tensor]:
    """Heads of tokens as integers: float32 [..., head_dim] -> (int8 of that shape, bfloat16 [...]), x is
    about code * scale. Codes round half to even.

    The scale is that of the vector's largest magnitude, rounded up to a bfloat16, so that no code exceeds
    127. It depends on its own vector alone, so that company changes no bit. NaN or infinity makes the whole
    vector NaN. A code (7 bits) times a scale (8 bits) is exact in float32: attention over INT8 is attention
    over these float32 products."""
    # The limit is a tensor on x's device: divided by a number of the host, CUDA multiplies by its reciprocal.
    scale = x.abs().amax(dim=-1) / x.new_tensor(LIMIT)
    scale = torch.where(scale < SMALLEST_SCALE, 0.0, scale)
    upper = ((scale.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    scale = torch.where(scale.isfinite(), upper, torch.nan)
    divisor = torch.where(scale > 0, scale, torch.inf)
    return torch.round(x / divisor[..., None]).nan_to_num(0.0).to(torch.int8), scale.bfloat16()
