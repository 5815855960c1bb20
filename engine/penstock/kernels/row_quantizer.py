"""NativeRowQuantizer: cpu.c's quantizing of weights to INT8. Its plain twin is in weights/quantize.py."""

from __future__ import annotations

import ctypes
import math
from functools import cache

import torch
from torch import Tensor

from penstock.kernels.cpu_builds import load_library
from penstock.kernels.operands import QuantizedTensor

#: The codes by which cpu.c knows the dtypes of weights; weights of other dtypes are converted to float32.
_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class NativeRowQuantizer:
    """Quantizes one chunk of a matrix after the other, in the thread that calls."""

    def __init__(self, build: str | None = None) -> None:
        """`build` as in NativeKernels. Raises ConfigError where there is none."""
        self._library = _library(build)
        self._sums = (ctypes.c_double * 2)()

    def quantize(self, weight: Tensor, out: QuantizedTensor) -> None:
        """Quantize rows of any floating dtype into `out`, whose rows and scales are contiguous. Raises
        ValueError for NaN or infinity."""
        weight = weight.to(weight.dtype if weight.dtype in _CODES else torch.float32).contiguous()
        assert out.qweight.is_contiguous() and out.scale.is_contiguous()
        num_scales = out.scale.numel()
        self._library.penstock_quantize_weights(
            weight.data_ptr(), _CODES[weight.dtype], num_scales, weight.numel() // max(1, num_scales),
            out.qweight.data_ptr(), out.scale.data_ptr(), self._sums,
        )  # fmt: skip
        if math.isnan(self._sums[1]):
            raise ValueError("the matrix holds NaN or infinite values")

    def loss(self, out: QuantizedTensor) -> tuple[float, float]:
        """Sums of squares: of what was lost when the last chunk was quantized to `out`, and of the chunk."""
        return self._sums[0], self._sums[1]


@cache
def _library(build: str | None) -> ctypes.CDLL:
    return load_library(build)[1]
