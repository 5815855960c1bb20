"""Error-compensated rounding: GPTQ (Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ: Accurate Post-Training
Quantization for Generative Pre-trained Transformers", arXiv 2210.17323, algorithm 1).

Columns (inputs) are rounded one after the other. The columns that are not rounded yet make up for the error
of a column, as far as their inputs go together with its inputs in a calibration text. Columns with large
inputs come first, while many others can still make up for their errors; scales belong to the same groups as
in plain rounding, whatever the order.

What is rounded is not the checkpoint's matrix itself. The layers before are rounded already, so that their
inputs x differ from the inputs x' of the unquantized model. The matrix whose products with x come closest to
the checkpoint's products with x' is W (1 + sum((x' - x) x^T) H^-1), where H = sum(x x^T). (GPTAQ, arXiv
2504.02692, has the same aim and spreads this correction over the columns.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels import Int4Tensor, QuantizedTensor
from penstock.weights.quantize import WEIGHT_LIMIT, quantize
from penstock.weights.quantize_int4 import CODES, choose_scales, row_steps

#: Columns whose errors are carried to the others at once: many small updates become one product.
BLOCK = 128
#: Added to the Hessian's diagonal, as a share of its mean, so that it can be inverted.
DAMPING = 0.01


class Turns(NamedTuple):
    """The order in which columns are rounded, and how the later ones make up for the error of each."""

    #: int64 [in_features]: the column of each turn.
    order: Tensor
    #: float32 [in_features, in_features], by turns: the upper Cholesky factor of the inverse of sum(x x^T).
    factor: Tensor
    #: float32 [in_features, in_features], by turns: W shift is added to W before it is rounded.
    shift: Tensor


def plan_turns(hessian: Tensor, drift: Tensor) -> Turns:
    """Turns by falling sum of squares of the inputs, from sum(x x^T) and sum((x' - x) x^T), both float32
    [in_features, in_features].

    An input that was always zero is correlated with no other. Three float64 matrices are needed for a while.
    Raises ValueError where the calibration text left NaN or infinity, or a matrix without an inverse.
    """
    if not bool(torch.isfinite(hessian).all() and torch.isfinite(drift).all()):
        raise ValueError("the calibration text makes infinite activations")
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    work = hessian[order][:, order].double()
    diagonal = work.diagonal()
    diagonal += torch.where(diagonal == 0, 1.0, DAMPING * diagonal.mean())
    try:
        work = torch.linalg.cholesky(work)
        work = torch.cholesky_inverse(work)
        shift = drift[order][:, order] @ work.float()
        work = torch.linalg.cholesky(work, upper=True)
    except RuntimeError as error:  # LinAlgError
        raise ValueError(
            f"the correlations of its inputs can't be inverted ({error}); try a longer text"
        ) from error
    return Turns(order, work.float(), shift)


@dataclass(frozen=True)
class Grid:
    """The values that weights may become: integers from `lowest` to `highest` times the scale of a group."""

    lowest: int
    highest: int
    group_size: int
    #: The scales of one group, from float32 [num_rows, group_size] and the group's number: [num_rows].
    choose_scale: Callable[[Tensor, int], Tensor]


def compensate_int8(weight: Tensor, turns: Turns, out: QuantizedTensor) -> None:
    """INT8 of [num_rows, in_features] into `out`. Raises ValueError."""
    size = weight.shape[1] // out.num_groups
    grid = Grid(-WEIGHT_LIMIT, WEIGHT_LIMIT, size, lambda left, _: quantize(left).scale)
    integers, scales = _compensate(weight, turns, grid)
    out.qweight.copy_(integers)
    out.scale.copy_(scales.view(out.scale.shape))


def compensate_int4(weight: Tensor, turns: Turns, out: Int4Tensor) -> None:
    """Codes of [num_rows, in_features] into `out`, of as many bits as `out` has. Raises ValueError."""
    size, code = out.group_size, CODES[out.codebook]
    rows = row_steps(weight.float(), size, code)
    grid = Grid(
        code.lowest,
        code.highest,
        size,
        lambda left, group: choose_scales(left, size, rows, group, code)[:, 0],
    )
    integers, scales = _compensate(weight, turns, grid)
    out.codes.copy_(code.pack((integers - code.lowest).to(torch.uint8)))
    assert out.sub_scale is not None
    out.scale.copy_(rows.unit)
    out.sub_scale.copy_(rows.steps(scales))


def _compensate(weight: Tensor, turns: Turns, grid: Grid) -> tuple[Tensor, Tensor]:
    """Integers (int8 [num_rows, in_features]) and scales (float32 [num_rows, num_groups]). Rows do not depend
    on each other. A group's scale is chosen when the first of its columns has its turn, from what the columns
    are by then."""
    order, factor, shift = turns
    left = weight.float()[:, order]
    left += left @ shift
    num_rows, width = left.shape
    integers = torch.empty(num_rows, width, dtype=torch.int8)
    scales: dict[int, Tensor] = {}
    columns, groups = torch.argsort(order), (order // grid.group_size).tolist()
    for start in range(0, width, BLOCK):
        end = min(start + BLOCK, width)
        errors = torch.zeros(num_rows, end - start)
        for turn, group in enumerate(groups[start:end], start):
            if group not in scales:
                members = columns[group * grid.group_size : (group + 1) * grid.group_size]
                # Columns after this block don't have the block's errors yet.
                carried = factor[start:end, members].where(members >= end, 0.0)
                scales[group] = grid.choose_scale(left[:, members] - errors @ carried, group)
            rounded, error = _round(left[:, turn], scales[group], float(factor[turn, turn]), grid)
            integers[:, order[turn]], errors[:, turn - start] = rounded, error
            left[:, turn:end] -= torch.outer(error, factor[turn, turn:end])
        left[:, end:] -= errors @ factor[start:end, end:]
    return integers, torch.stack([scales[group] for group in range(len(scales))], dim=1)


def _round(column: Tensor, scale: Tensor, pivot: float, grid: Grid) -> tuple[Tensor, Tensor]:
    """The integers of a column, and its error in units of the factor's diagonal."""
    divisor = torch.where(scale != 0, scale, torch.inf)
    rounded = (column / divisor).round_().clamp_(grid.lowest, grid.highest)
    return rounded.to(torch.int8), (column - rounded * scale) / pivot
