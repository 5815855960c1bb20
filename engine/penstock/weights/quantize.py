"""INT8 per output channel: w ~ qweight * scale with scale = max|row| / 127, and how far off that is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels import QuantizedTensor

WEIGHT_LIMIT = 127


def quantize(weight: Tensor) -> QuantizedTensor:
    """Symmetric INT8 with one scale per row (output channel).

    weight is [out_features, in_features] in any floating dtype; a row of zeros gets scale 0. Rounds half
    to even. Raises ValueError for NaN or infinity.
    """
    out = QuantizedTensor(torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight)))
    RowQuantizer(*weight.shape).quantize(weight, out)
    return out


class RowQuantizer:
    """quantize() for chunk after chunk of a matrix, in memory that is taken once: taken for each chunk anew,
    it costs more in page faults than the arithmetic takes."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        """For chunks of at most `num_rows`."""
        self._exact = torch.empty(num_rows, num_columns)
        self._work = torch.empty(num_rows, num_columns)

    def quantize(self, weight: Tensor, out: QuantizedTensor) -> None:
        """quantize() into `out`."""
        exact, work = self._exact[: len(weight)], self._work[: len(weight)]
        exact.copy_(weight)
        scale = torch.abs(exact, out=work).amax(dim=1) / WEIGHT_LIMIT
        if not bool(torch.isfinite(scale).all()):
            raise ValueError("it holds NaN or infinite values")
        # A subnormal scale has too few bits to divide by; what it would stand for is nothing.
        out.scale.copy_(torch.where(scale >= torch.finfo(torch.float32).tiny, scale, 0.0))
        divisor = torch.where(out.scale > 0, out.scale, torch.inf)
        # No quotient is beyond 127 (1 + 2^-23), which rounds to 127.
        out.qweight.copy_(torch.div(exact, divisor[:, None], out=work).round_())

    def loss(self, out: QuantizedTensor) -> tuple[float, float]:
        """Sums of squares: of what was lost when `out` was quantized, the last that was, and of what it was
        made of. To be asked once: it is computed in place."""
        exact, work = self._exact[: len(out.scale)], self._work[: len(out.scale)]
        of = float(torch.linalg.vector_norm(exact)) ** 2
        exact.addcmul_(work, out.scale[:, None], value=-1)
        return float(torch.linalg.vector_norm(exact)) ** 2, of


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
    def of(cls, name: str, weight: Tensor, quantized: QuantizedTensor) -> QuantizationError:
        """Compare [out_features, in_features] with its quantized form."""
        exact = weight.double()
        rows = (exact - quantized.dequantize().double()).square().sum(1)
        norms = exact.square().sum(1)
        nonzero = norms.clamp_min(torch.finfo(torch.float64).tiny)
        rms = (nonzero / weight.shape[1]).sqrt()
        return cls(
            name,
            relative=float((rows.sum() / nonzero.sum()).sqrt()),
            worst_channel=float((rows / nonzero).max().sqrt()),
            outlier_ratio=float((exact.abs().amax(1) / rms).max()),
        )
