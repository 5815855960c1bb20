"""INT8 per output channel or group of inputs: w ~ qweight * scale with scale = max|row| / 127, and how far
off that is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels import QuantizedTensor

WEIGHT_LIMIT = 127
#: Of a matrix that are compared with their quantized form at a time.
CHUNK_ELEMENTS = 1 << 22


def quantize(weight: Tensor, group_size: int = 0) -> QuantizedTensor:
    """Symmetric INT8 with one scale per row (output channel), or per `group_size` inputs of it.

    weight is [out_features, in_features] in any floating dtype; a row of zeros gets scale 0. Rounds half
    to even. Raises ValueError for NaN or infinity.
    """
    if group_size:
        groups = quantize(weight.reshape(-1, group_size))
        return QuantizedTensor(groups.qweight.view(weight.shape), groups.scale.view(weight.shape[0], -1))
    exact = weight.float()
    largest = torch.maximum(exact.amax(dim=1), -exact.amin(dim=1))  # abs() would make another copy
    scale = largest / WEIGHT_LIMIT
    if not bool(torch.isfinite(scale).all()):
        raise ValueError("it holds NaN or infinite values")
    # A subnormal scale has too few bits to divide by; what it would stand for is nothing.
    scale = torch.where(scale >= torch.finfo(torch.float32).tiny, scale, 0.0)
    divisor = torch.where(scale > 0, scale, torch.inf)
    own = exact.clone() if exact is weight else exact
    qweight = own.div_(divisor[:, None]).round_().clamp_(-WEIGHT_LIMIT, WEIGHT_LIMIT)
    return QuantizedTensor(qweight.to(torch.int8), scale)


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
        # Some rows at a time: an embedding in float64 would be larger than most models' layers.
        step = max(1, CHUNK_ELEMENTS // weight.shape[1])
        parts = [torch.split(tensor, step) for tensor in (weight, *quantized)]
        sums = [
            _row_sums(rows.double(), QuantizedTensor(qweight, scale))
            for rows, qweight, scale in zip(*parts, strict=True)
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


def _row_sums(exact: Tensor, quantized: QuantizedTensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: squares of what was lost, squares, the largest magnitude."""
    lost = (exact - quantized.dequantize().double()).square().sum(1)
    return lost, exact.square().sum(1), exact.abs().amax(1)
