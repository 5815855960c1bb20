"""CudaGroupedLinear: products on a GPU with weights that have a scale for each group of inputs. Weights are
4-bit codes, INT8, or planes of INT8."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.config import GROUP_SIZES
from penstock.kernels import reference
from penstock.kernels.cuda.launcher import THREADS, Launcher, ceil_div
from penstock.kernels.int4_tensor import CODEBOOKS, SCALE_CODES, Int4Tensor
from penstock.kernels.operands import QuantizedTensor
from penstock.kernels.planes_tensor import PlanesTensor

#: Up to this many tokens, the weights are read as a stream, once per 4 tokens.
MAX_GEMV_TOKENS = 16
#: As in grouped_products.cu: warps of a block that reads weights as a stream, tokens and channels of a tile.
GEMV_WARPS, TILE = 8, 64
#: Rows of activations are padded to this many bytes.
ROW_UNIT = 64
#: How grouped.cu unpacks the codes of a codebook; other codebooks are tables.
SHIFTS = {"signed": 4, "unsigned": 3}
#: What grouped.cu takes of a codebook: the shift (0 for a table) and the integers, four in a word.
CODEBOOK_ARGUMENTS = {
    name: (SHIFTS.get(name, 0), *struct.unpack("<4i", struct.pack("<16b", *integers)))
    for name, integers in CODEBOOKS.items()
}


class _Grouped(NamedTuple):
    """What all formats are to the kernels."""

    form: str
    weights: Tensor  # of planes the upper one
    scale: Tensor  # [out_features, num_groups / block_groups]
    group_size: int
    num_groups: int
    minimum: Tensor | None = None
    sub_scale: Tensor | None = None
    sub_minimum: Tensor | None = None
    order: Tensor | None = None
    codebook: str = "signed"
    lower: Tensor | None = None
    #: As `form`, of the kernels that quantize activations.
    rows: str = "groups"


class CudaGroupedLinear:
    """A group's sums are exact and groups are added in their order, so every kernel gives the same bits.
    torch's product on tensor cores would not pay: after each group, all sums would go through memory."""

    def __init__(self, launcher: Launcher, activations: str) -> None:
        self._launcher = launcher
        self._activations = activations
        #: INT8 rows of a token: 16-bit activations are split into hi and lo.
        self._parts = 2 if activations == "int16" else 1

    def int8_product(
        self, x: Tensor, weight: QuantizedTensor, bias: Tensor | None, y: Tensor | None = None
    ) -> Tensor:
        """x W^T + bias: [num_tokens, in_features] -> [num_tokens, out_features], in y if it is given."""
        size = x.shape[1] // weight.num_groups
        if size not in GROUP_SIZES:  # a rare shape, not worth a kernel
            return _placed(reference.linear(x, weight, bias, self._activations), y)
        grouped = _Grouped("groups", weight.qweight, weight.scale, size, weight.num_groups)
        return self._product(x, grouped, bias, y)

    def planes_product(
        self, x: Tensor, weight: PlanesTensor, bias: Tensor | None, y: Tensor | None = None
    ) -> Tensor:
        """x W^T + bias: [num_tokens, in_features] -> [num_tokens, out_features], in y if it is given."""
        size = x.shape[1] // weight.num_groups
        if size not in GROUP_SIZES:
            return _placed(reference.linear(x, weight.joined(), bias, self._activations), y)
        grouped = _Grouped(
            "plane_groups", weight.upper, weight.scale, size, weight.num_groups, lower=weight.lower
        )
        return self._product(x, grouped, bias, y)

    def int4_product(
        self, x: Tensor, weight: Int4Tensor, bias: Tensor | None, y: Tensor | None = None
    ) -> Tensor:
        """x W^T + bias: [num_tokens, in_features] -> [num_tokens, out_features], in y if it is given."""
        weight = weight.in_nibbles()  # codes of 3 and 2 bits have no kernels here yet
        if weight.group_size not in GROUP_SIZES:
            return _placed(reference.int4_linear(x, weight, bias, self._activations), y)
        grouped = _Grouped(
            "codes", weight.codes, weight.scale, weight.group_size, weight.num_groups,
            weight.minimum, weight.sub_scale, weight.sub_minimum, weight.order, weight.codebook, rows="codes",
        )  # fmt: skip
        return self._product(x, grouped, bias, y)

    def _product(self, x: Tensor, weight: _Grouped, bias: Tensor | None, y: Tensor | None = None) -> Tensor:
        (num_tokens, in_features), out_features = x.shape, weight.weights.shape[0]
        rows, token_scales, group_sums = self._quantize(x, weight)
        weights, lower = _aligned(weight.weights), None if weight.lower is None else _aligned(weight.lower)
        y = x.new_empty(num_tokens, out_features) if y is None else y
        kernel, grid = _kernel(weight.form, num_tokens, out_features)
        self._launcher.launch(
            f"{weight.form}_{kernel}_{self._parts}", grid, THREADS,
            rows, token_scales, group_sums, num_tokens, rows.shape[1],
            weights, lower, weight.scale, weight.minimum, weight.sub_scale, weight.sub_minimum,
            SCALE_CODES[weight.scale.dtype], weight.num_groups // weight.scale.shape[1], weight.group_size,
            *CODEBOOK_ARGUMENTS[weight.codebook], bias, in_features, out_features, y, y.stride(0),
        )  # fmt: skip
        return y

    def _quantize(self, x: Tensor, weight: _Grouped) -> tuple[Tensor, Tensor, Tensor]:
        """INT8 rows [num_tokens * parts, in_features padded to whole units]; each token's scale; the sum of
        each group of a token, int32 [num_tokens, num_groups]."""
        num_tokens, in_features = x.shape
        padded = ceil_div(in_features, ROW_UNIT) * ROW_UNIT
        rows = x.new_empty(num_tokens * self._parts, padded, dtype=torch.int8)
        token_scales = x.new_empty(num_tokens)
        group_sums = x.new_empty(num_tokens, weight.num_groups, dtype=torch.int32)
        self._launcher.launch(
            f"{weight.rows}_quantize_{self._parts}", (num_tokens,), THREADS,
            x, x.stride(0), weight.order, in_features, padded, weight.group_size,
            rows, token_scales, group_sums,
        )  # fmt: skip
        return rows, token_scales, group_sums


def _placed(found: Tensor, y: Tensor | None) -> Tensor:
    return found if y is None else y.copy_(found)


def _aligned(weights: Tensor) -> Tensor:
    """The weights, or a copy: only a copy is sure to begin where 16 bytes can be read at once."""
    return weights.clone() if weights.data_ptr() % 16 else weights


def _kernel(form: str, num_tokens: int, out_features: int) -> tuple[str, tuple[int, int]]:
    """The kernel's name for this many tokens, and its grid."""
    if num_tokens > MAX_GEMV_TOKENS:
        return "tiled", (ceil_div(num_tokens, TILE), ceil_div(out_features, TILE))
    tokens = next((size for size in (1, 2) if num_tokens <= size), 4)
    channels = GEMV_WARPS * (4 if tokens == 1 and form == "codes" else 2)
    return f"gemv_{tokens}", (ceil_div(num_tokens, tokens), ceil_div(out_features, channels))
