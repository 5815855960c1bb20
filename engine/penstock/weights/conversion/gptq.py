"""Error-compensated rounding: GPTQ (Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ: Accurate Post-Training
Quantization for Generative Pre-trained Transformers", arXiv 2210.17323, algorithm 1).

Columns (inputs) are rounded one after the other. The columns that are not rounded yet make up for the error
of a column, as far as their inputs go together with its inputs in a calibration text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels import QuantizedTensor
from penstock.weights.quantize import WEIGHT_LIMIT, quantize

#: Columns whose errors are carried to the others at once: many small updates become one product.
BLOCK = 128
#: Added to the Hessian's diagonal, as a share of its mean, so that it can be inverted.
DAMPING = 0.01


def inverse_factor(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of sum(x x^T), float32 [in_features, in_features].

    An input that was always zero is correlated with no other. Three float64 matrices are needed for a while.
    Raises ValueError where the calibration text left NaN or infinity, or a matrix without an inverse.
    """
    if not bool(torch.isfinite(hessian).all()):
        raise ValueError("the calibration text makes infinite activations")
    work = hessian.double()
    diagonal = work.diagonal()
    diagonal += torch.where(diagonal == 0, 1.0, DAMPING * diagonal.mean())
    try:
        work = torch.linalg.cholesky(work)
        work = torch.cholesky_inverse(work)
        work = torch.linalg.cholesky(work, upper=True)
    except RuntimeError as error:  # LinAlgError
        raise ValueError(
            f"the correlations of its inputs can't be inverted ({error}); try a longer text"
        ) from error
    factor: Tensor = work.float()
    return factor


def quantize_compensated(weight: Tensor, factor: Tensor, group_size: int = 0) -> QuantizedTensor:
    """INT8 of [out_features, in_features], by inverse_factor() of its inputs; rows do not depend on each
    other. Scales are made by quantize(), from whole rows, or from the state of a group when its turn comes.
    Raises ValueError."""
    left = weight.float().clone()
    num_rows, width = left.shape
    qweight = torch.empty(num_rows, width, dtype=torch.int8)
    scales = [] if group_size else [quantize(left).scale]
    for start in range(0, width, BLOCK):
        end = min(start + BLOCK, width)
        errors = torch.zeros(num_rows, end - start)
        for column in range(start, end):
            if group_size and column % group_size == 0:
                scales.append(quantize(left[:, column : column + group_size]).scale)
            rounded, error = _round(left[:, column], scales[-1], float(factor[column, column]))
            qweight[:, column], errors[:, column - start] = rounded, error
            left[:, column:end] -= torch.outer(error, factor[column, column:end])
        left[:, end:] -= errors @ factor[start:end, end:]
    return QuantizedTensor(qweight, torch.stack(scales, dim=1) if group_size else scales[0])


def _round(column: Tensor, scale: Tensor, pivot: float) -> tuple[Tensor, Tensor]:
    """The integers of a column, and its error in units of the factor's diagonal."""
    divisor = torch.where(scale > 0, scale, torch.inf)
    rounded = (column / divisor).round_().clamp_(-WEIGHT_LIMIT, WEIGHT_LIMIT)
    return rounded.to(torch.int8), (column - rounded * scale) / pivot
