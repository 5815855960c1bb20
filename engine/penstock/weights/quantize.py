"""INT8 per output channel or group of inputs: w ~ qweight * scale with scale = max|row| / 127."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from penstock.kernels import QuantizedTensor
from penstock.kernels.cpu_builds import compiled_builds
from penstock.kernels.row_quantizer import NativeRowQuantizer

WEIGHT_LIMIT = 127


def quantize(weight: Tensor, group_size: int = 0) -> QuantizedTensor:
    """Symmetric INT8 with one scale per row (output channel), or per `group_size` inputs of it.

    weight is [out_features, in_features] in any floating dtype; a row of zeros gets scale 0. Rounds half
    to even. Raises ValueError for NaN or infinity.
    """
    width = group_size or weight.shape[1]
    scale = torch.empty(weight.shape[0], weight.shape[1] // width)
    out = QuantizedTensor(
        torch.empty(weight.shape, dtype=torch.int8), scale if group_size else scale.flatten()
    )
    row_quantizer().quantize(weight, out)
    return out


def row_quantizer() -> NativeRowQuantizer | RowQuantizer:
    """A quantizer for one chunk of a matrix after the other, compiled if that is there. Both compute the same
    bits."""
    return NativeRowQuantizer() if _has_native() else RowQuantizer()


@cache
def _has_native() -> bool:
    return bool(compiled_builds())


class RowQuantizer:
    """The quantizer of torch's operations. Memory is allocated for the first chunk, which is
    the largest: page faults of memory that is allocated for each chunk anew take longer than the
    arithmetic."""

    def __init__(self) -> None:
        self._exact = self._work = torch.empty(0)

    def quantize(self, weight: Tensor, out: QuantizedTensor) -> None:
        """quantize() into `out`."""
        if weight.numel() > self._exact.numel():
            self._exact, self._work = torch.empty(weight.numel()), torch.empty(weight.numel())
        exact, work, scales = self._views(out)
        exact.view(weight.shape).copy_(weight)
        scale = torch.abs(exact, out=work).amax(dim=1) / WEIGHT_LIMIT
        if not bool(torch.isfinite(scale).all()):
            raise ValueError("the matrix holds NaN or infinite values")
        # A subnormal scale has too few bits to divide by. The weights of such a row or group become zeros.
        scales.copy_(torch.where(scale >= torch.finfo(torch.float32).tiny, scale, 0.0))
        divisor = torch.where(scales > 0, scales, torch.inf)
        # No quotient is beyond 127 (1 + 2^-23), which rounds to 127.
        torch.div(exact, divisor[:, None], out=work).round_()
        out.qweight.copy_(work.view(weight.shape))

    def loss(self, out: QuantizedTensor) -> tuple[float, float]:
        """Sums of squares: of what was lost when the last chunk was quantized to `out`, and of the chunk. Can
        be called once for each chunk: the result is computed in place."""
        exact, work, scales = self._views(out)
        of = _sum_of_squares(exact)
        exact.addcmul_(work, scales[:, None], value=-1)
        return _sum_of_squares(exact), of

    def _views(self, out: QuantizedTensor) -> tuple[Tensor, Tensor, Tensor]:
        """The two buffers as [num_scales, inputs per scale], and the scales as [num_scales]."""
        scales, count = out.scale.view(-1), out.qweight.numel()
        shape = (len(scales), count // max(1, len(scales)))
        return self._exact[:count].view(shape), self._work[:count].view(shape), scales


def _sum_of_squares(values: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(values))
    if not math.isfinite(norm):  # float32 has no square of 1e30; float64 takes ten times as long
        norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    return norm**2
