"""TorchKernels: the reference with torch's own INT8 product, on the CPU and on CUDA. They serve where nothing
was compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels import reference
from penstock.kernels.int4_tensor import Int4Tensor
from penstock.kernels.operands import MAX_IN_FEATURES, QuantizedTensor
from penstock.kernels.reference import (
    PlainKernels,
    plain_traits,
    quantize_activations,
    scale_sums,
    split_rows,
)

#: Rows are padded to this number on CUDA: torch._int_mm wants more than 16.
MIN_CUDA_ROWS = 32
#: Where there is no INT8 product, this many output channels at a time are held as float64.
BLOCK_CHANNELS = 1024


class TorchKernels(PlainKernels):
    """Plain torch, with torch's INT8 product."""

    traits = plain_traits("torch")

    def _int8_linear(self, x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
        is_wide = x.shape[1] > MAX_IN_FEATURES
        if is_wide or weight.num_groups > 1 or not _int_mm_takes(weight.qweight):
            return self._in_blocks(x, weight, bias)
        q, token_scale = quantize_activations(x, self.activations)
        if self.activations == "int8":
            sums = _int_mm(q.to(torch.int8), weight.qweight).double()
        else:
            hi, lo = _int_mm(torch.cat(split_rows(q)), weight.qweight).double().chunk(2)
            sums = torch.add(lo, hi, alpha=256)
        y = scale_sums(sums, token_scale, weight.scale.flatten())
        return y if bias is None else y + bias

    def _in_blocks(self, x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
        """The reference product of some channels at a time, since it copies their weights as float64."""
        blocks = zip(*(torch.split(part, BLOCK_CHANNELS) for part in weight), strict=True)
        y = torch.cat(
            [reference.linear(x, QuantizedTensor(*block), None, self.activations) for block in blocks], dim=1
        )
        return y if bias is None else y + bias

    def _int4_linear(self, x: Tensor, weight: Int4Tensor, bias: Tensor | None) -> Tensor:
        starts = range(0, weight.out_features, BLOCK_CHANNELS)
        blocks = [weight.rows(start, start + BLOCK_CHANNELS) for start in starts]
        y = torch.cat([reference.int4_linear(x, block, None, self.activations) for block in blocks], dim=1)
        return y if bias is None else y + bias


def _int_mm_takes(qweight: Tensor) -> bool:
    if qweight.is_cuda:  # cuBLASLt needs tensor cores and sizes in multiples of 8
        has_tensor_cores = torch.cuda.get_device_capability(qweight.device) >= (7, 5)
        return has_tensor_cores and all(size % 8 == 0 for size in qweight.shape)
    return 1 not in qweight.shape  # torch 2.13 mistakes a single row or column for its transpose


def _int_mm(rows: Tensor, qweight: Tensor) -> Tensor:
    """rows qweight^T: int8 [num_rows, in_features] -> int32 [num_rows, out_features]."""
    num_rows = rows.shape[0]
    if rows.is_cuda and num_rows < MIN_CUDA_ROWS:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, MIN_CUDA_ROWS - num_rows))
    return torch._int_mm(rows, qweight.t())[:num_rows]
