"""INT8 per output channel or group of inputs: w ~ qweight * scale with scale = max|row| / 127, and how far
off that is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels import Matrix, QuantizedTensor

WEIGHT_LIMIT = 127
#: Of a matrix that are compared with their quantized form at a time.
CHUNK_ELEMENTS = 1 << 22


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
    RowQuantizer(*weight.shape).quantize(weight, out)
    return out


class RowQuantizer:
    """quantize() for chunk after chunk of a matrix, in memory that is taken once: taken for each chunk anew,
    it costs more in page faults than the arithmetic takes."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        """For chunks of at most `num_rows`."""
        self._exact = torch.empty(num_rows * num_columns)
        self._work = torch.empty(num_rows * num_columns)

    def quantize(self, weight: Tensor, out: QuantizedTensor) -> None:
        """quantize() into `out`."""
        exact, work, scales = self._views(out)
        exact.view(weight.shape).copy_(weight)
        scale = torch.abs(exact, out=work).amax(dim=1) / WEIGHT_LIMIT
        if not bool(torch.isfinite(scale).all()):
            raise ValueError("it holds NaN or infinite values")
        # A subnormal scale has too few bits to divide by; what it would stand for is nothing.
        scales.copy_(torch.where(scale >= torch.finfo(torch.float32).tiny, scale, 0.0))
        divisor = torch.where(scales > 0, scales, torch.inf)
        # No quotient is beyond 127 (1 + 2^-23), which rounds to 127.
        torch.div(exact, divisor[:, None], out=work).round_()
        out.qweight.copy_(work.view(weight.shape))

    def loss(self, out: QuantizedTensor) -> tuple[float, float]:
        """Sums of squares: of what was lost when `out` was quantized, the last that was, and of what it was
        made of. To be asked once: it is computed in place."""
        exact, work, scales = self._views(out)
        of = _sum_of_squares(exact)
        exact.addcmul_(work, scales[:, None], value=-1)
        return _sum_of_squares(exact), of

    def _views(self, out: QuantizedTensor) -> tuple[Tensor, Tensor, Tensor]:
        """The two buffers [num_scales, inputs of each], and the scales in a row."""
        scales, count = out.scale.view(-1), out.qweight.numel()
        shape = (len(scales), count // max(1, len(scales)))
        return self._exact[:count].view(shape), self._work[:count].view(shape), scales


def _sum_of_squares(values: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(values))
    if not math.isfinite(norm):  # float32 has no square of 1e30; float64 takes ten times as long
        norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
    return norm**2


@dataclass(frozen=True)
class QuantizationError:
    """How far a tensor's INT8 form is from what the checkpoint holds."""

    name: str
    #: Frobenius norm of the difference over that of the tensor.
    relative: float
    #: The same for the worst output channel.
    worst_channel: float
    #: Largest magnitude over the root mean square, of the channel where that is largest: what makes
    #: absmax scales coarse.
    outlier_ratio: float

    @classmethod
    def of(cls, name: str, weight: Tensor, quantized: Matrix) -> QuantizationError:
        """Compare [out_features, in_features] with its quantized form."""
        # Some rows at a time: an embedding in float64 would be larger than most models' layers.
        step = max(1, CHUNK_ELEMENTS // weight.shape[1])
        sums = [
            _row_sums(rows.double(), quantized.rows(start, start + len(rows)))
            for start, rows in zip(range(0, len(weight), step), torch.split(weight, step), strict=True)
        ]
        lost, norms, peaks = (torch.cat(column) for column in zip(*sums, strict=True))
        nonzero = norms.clamp_min(torch.finfo(torch.float64).tiny)
        rms = (nonzero / weight.shape[1]).sqrt()
        return cls(
            name,
            relative=float((lost.sum() / nonzero.sum()).sqrt()),
            worst_channel=float((lost / nonzero).max().sqrt()),
            outlier_ratio=float((peaks / rms).max()),
        )


def _row_sums(exact: Tensor, quantized: Matrix) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: squares of what was lost, squares, the largest magnitude."""
    lost = (exact - quantized.dequantize().double()).square().sum(1)
    return lost, exact.square().sum(1), exact.abs().amax(1)
