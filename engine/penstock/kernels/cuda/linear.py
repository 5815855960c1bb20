"""CudaLinear: products on a GPU with INT8 weights that have a scale per output channel, whole or in planes,
by whichever kernel suits their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels import reference
from penstock.kernels.cuda.launcher import OPEN, THREADS, Launcher, Prepared, ceil_div
from penstock.kernels.operands import MAX_IN_FEATURES, QuantizedTensor
from penstock.kernels.planes_tensor import PlanesTensor

#: Up to this many INT8 rows, the weights are read as a stream, once per 8 tokens. Hi and lo are two rows.
MAX_GEMV_ROWS = 32
#: The most sums of torch's INT8 product that are held at a time.
MAX_SUMS_BYTES = 32 << 20
#: Warps of a block that reads weights as a stream, and channels of a tile, as in int8.cu.
GEMV_WARPS, TILE_COLUMNS = 8, 128
#: Rows of activations are padded to this many bytes.
ROW_UNIT = 64
FLOAT_BYTES = 4
#: Up to so many tokens, launches are prepared: a step of few tokens is short, and has as many launches.
MAX_FEW = 8


@dataclass(frozen=True, eq=False)
class _FewRows:
    """Memory in which so few tokens become integers."""

    rows: Tensor  # int8 [num_tokens * parts, in_features padded to whole units]
    token_scales: Tensor
    #: Of x and x.stride(0).
    quantize: Prepared


class CudaLinear:
    """The product's integer sums are exact, so every kernel gives the same bits."""

    def __init__(self, launcher: Launcher, activations: str) -> None:
        self._launcher = launcher
        self._activations = activations
        #: INT8 rows of a token: 16-bit activations are split into hi and lo.
        self._parts = 2 if activations == "int16" else 1
        #: By numbers of inputs: rows for few tokens; and by tokens and inputs, the first ones of these.
        self._few_rows: dict[int, tuple[Tensor, Tensor]] = {}
        self._few: dict[tuple[int, int], _FewRows] = {}

    def product(self, x: Tensor, weight: QuantizedTensor | PlanesTensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias: [num_tokens, in_features] -> [num_tokens, out_features]."""
        y = x.new_empty(x.shape[0], weight.out_features)
        self.write_products(x, (weight,), y, bias)
        return y

    def write_products(
        self,
        x: Tensor,
        weights: Sequence[QuantizedTensor | PlanesTensor],
        y: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """product() with each of some matrices, into the first columns of y, one matrix beside the other. x
        is rounded to integers once."""
        num_tokens, column = x.shape[0], 0
        if x.shape[1] > MAX_IN_FEATURES:
            for each in weights:
                whole = each.joined() if isinstance(each, PlanesTensor) else each
                part = reference.linear(x, whole, bias, self._activations)
                y[:, column : column + part.shape[1]] = part
                column += part.shape[1]
            return
        if 0 < num_tokens <= MAX_FEW:
            few = self._rows_of_few(num_tokens, x.shape[1], x.device)
            few.quantize(x, x.stride(0))
            rows, token_scales = few.rows, few.token_scales
        else:
            few, (rows, token_scales) = None, self._quantize(x)
        address, stride = y.data_ptr(), y.stride(0)
        for weight in weights:
            prepared = None if few is None else self._prepared(few, weight)
            if prepared is not None:
                prepared(bias, address + FLOAT_BYTES * column if column else y, stride)
                column += weight.out_features
                continue
            end = column + weight.out_features
            self._product(rows, token_scales, weight, bias, y[:, column:end])
            column = end

    def _rows_of_few(self, num_tokens: int, in_features: int, device: torch.device) -> _FewRows:
        """The stream's order keeps apart the products that use the same memory."""
        few = self._few.get((num_tokens, in_features))
        if few is None:
            whole = self._few_rows.get(in_features)
            if whole is None:
                whole = self._few_rows[in_features] = _empty_rows(MAX_FEW, self._parts, in_features, device)
            rows, token_scales = whole[0][: num_tokens * self._parts], whole[1][:num_tokens]
            quantize = self._launcher.prepare(
                *self._quantizer(num_tokens), OPEN, OPEN, in_features, rows.shape[1], rows, token_scales
            )
            few = self._few[num_tokens, in_features] = _FewRows(rows, token_scales, quantize)
        return few

    def _prepared(self, few: _FewRows, weight: QuantizedTensor | PlanesTensor) -> Prepared | None:
        """A product of few tokens, but for bias, output and the output's stride. Kept with the matrix, whose
        tensors never move; from its second use on, since some matrices are views for one use."""
        kept: dict[_FewRows, Prepared | None] = weight.__dict__.setdefault("prepared", {})
        if few not in kept:
            kept[few] = None
            return None
        prepared = kept[few]
        if prepared is None and not _has_to_be_joined(weight):
            name, grid, *values = self._launch_of(few.rows, few.token_scales, weight, OPEN)
            prepared = kept[few] = self._launcher.prepare(name, grid, THREADS, *values, OPEN, OPEN)
        return prepared

    def _product(
        self,
        rows: Tensor,
        token_scales: Tensor,
        weight: QuantizedTensor | PlanesTensor,
        bias: Tensor | None,
        y: Tensor,
    ) -> None:
        """product(), with the integers of x."""
        if isinstance(weight, PlanesTensor) and _has_to_be_joined(weight):
            weight = self._joined(weight)
        if self._has_tensor_product(len(token_scales), weight):
            self._tensor_product(rows, token_scales, weight, bias, y)
            return
        name, grid, *values = self._launch_of(rows, token_scales, weight, bias)
        self._launcher.launch(name, grid, THREADS, *values, y, y.stride(0))

    def _launch_of(
        self, rows: Tensor, token_scales: Tensor, weight: QuantizedTensor | PlanesTensor, bias: object
    ) -> tuple[Any, ...]:
        """The kernel's name and grid, and its arguments before the output."""
        num_tokens, (out_features, in_features) = len(token_scales), weight.shape
        if isinstance(weight, PlanesTensor):
            form, qweight, lower, is_aligned = "planes_", weight.upper, weight.lower, True
        else:
            form, qweight, lower = "", weight.qweight, None
            is_aligned = in_features % 16 == 0 and qweight.data_ptr() % 16 == 0
        kernel, grid = self._kernel(num_tokens, out_features, is_aligned)
        return (
            f"{form}{kernel}_{self._parts}", grid, rows, token_scales, num_tokens, rows.shape[1],
            qweight, lower, weight.scale, bias, in_features, out_features,
        )  # fmt: skip

    def _joined(self, planes: PlanesTensor) -> QuantizedTensor:
        """Planes as INT8, in memory of their own."""
        upper, lower = planes.upper, planes.lower
        qweight = upper.new_empty(planes.shape, dtype=torch.int8)
        addresses = [each.data_ptr() for each in (upper, lower) if each is not None]
        is_aligned = all(number % 8 == 0 for number in (upper.numel(), *addresses))
        self._launcher.launch(
            "join_planes", (ceil_div(upper.numel(), 4 * THREADS),), THREADS,
            upper, lower, upper.numel(), is_aligned, qweight,
        )  # fmt: skip
        return QuantizedTensor(qweight, planes.scale)

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """INT8 rows [num_tokens * parts, in_features padded to whole units], and each token's scale."""
        num_tokens, in_features = x.shape
        rows, token_scales = _empty_rows(num_tokens, self._parts, in_features, x.device)
        self._launcher.launch(
            *self._quantizer(num_tokens), x, x.stride(0), in_features, rows.shape[1], rows, token_scales
        )
        return rows, token_scales

    def _quantizer(self, num_tokens: int) -> tuple[str, tuple[int], int]:
        """The kernel, its grid and its threads."""
        return f"quantize_{self._parts}", (num_tokens,), THREADS

    def _has_tensor_product(self, num_tokens: int, weight: QuantizedTensor | PlanesTensor) -> bool:
        """Whether torch._int_mm can use tensor cores. It wants more than 16 rows, sizes in multiples of 8,
        and rows without padding. Planes get such an address when they are joined."""
        if not self._launcher.has_tensor_cores or num_tokens * self._parts <= MAX_GEMV_ROWS:
            return False
        out_features, in_features = weight.shape
        address = 0 if isinstance(weight, PlanesTensor) else weight.qweight.data_ptr()
        return out_features % 8 == in_features % ROW_UNIT == address % 16 == 0

    def _tensor_product(
        self,
        rows: Tensor,
        token_scales: Tensor,
        weight: QuantizedTensor | PlanesTensor,
        bias: Tensor | None,
        y: Tensor,
    ) -> None:
        """torch's product of some channels at a time: int32 sums take `parts` times the room of y, and joined
        planes no more than sums may."""
        num_tokens, out_features = y.shape
        most = 4 * rows.shape[0]
        if isinstance(weight, PlanesTensor):
            most = max(most, weight.shape[1])
        num_columns = max(8, MAX_SUMS_BYTES // most // 8 * 8)
        for first in range(0, out_features, num_columns):
            some = weight.rows(first, first + num_columns)
            some = self._joined(some) if isinstance(some, PlanesTensor) else some
            sums = torch._int_mm(rows, some.qweight.t())
            self._launcher.launch(
                f"combine_{self._parts}", (num_tokens, ceil_div(sums.shape[1], THREADS)), THREADS,
                sums, first, sums.shape[1], token_scales, num_tokens, weight.scale, bias, out_features, y,
                y.stride(0),
            )  # fmt: skip

    def _kernel(self, num_tokens: int, out_features: int, is_aligned: bool) -> tuple[str, tuple[int, int]]:
        """The kernel's name for this many tokens, and its grid."""
        num_rows = num_tokens * self._parts
        if num_rows <= MAX_GEMV_ROWS:
            tokens = next((size for size in (1, 2, 4) if num_tokens <= size and is_aligned), 8)
            columns = GEMV_WARPS * (4 if tokens * self._parts > 4 else 2)
            grid = ceil_div(out_features, columns), ceil_div(num_tokens, tokens)
            return f"gemv_{tokens if is_aligned else 'any'}", grid
        column_tiles = ceil_div(out_features, TILE_COLUMNS)
        # Tiles of half the height where whole ones would leave multiprocessors without two blocks.
        is_low = ceil_div(num_rows, 128) * column_tiles < 2 * self._launcher.num_multiprocessors
        height = 4 if is_low and is_aligned else 8
        return f"tiled_{height if is_aligned else 'any'}", (ceil_div(num_rows, 16 * height), column_tiles)


def _has_to_be_joined(weight: QuantizedTensor | PlanesTensor) -> bool:
    """Whether planes can't be joined while they are loaded: 8 bytes of each can't be read at once."""
    if not isinstance(weight, PlanesTensor):
        return False
    parts = (weight.upper,) if weight.lower is None else (weight.upper, weight.lower)
    return weight.shape[1] % 16 != 0 or any(part.data_ptr() % 8 for part in parts)


def _empty_rows(
    num_tokens: int, num_parts: int, in_features: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Memory for quantized rows, `num_parts` for each token, and for the tokens' scales."""
    padded = ceil_div(in_features, ROW_UNIT) * ROW_UNIT
    rows = torch.empty(num_tokens * num_parts, padded, dtype=torch.int8, device=device)
    return rows, torch.empty(num_tokens, dtype=torch.float32, device=device)
