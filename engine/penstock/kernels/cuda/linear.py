"""CudaLinear: products on a GPU with INT8 weights that have a scale per output channel, whole or in planes,
by whichever kernel suits their sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels import reference
from penstock.kernels.cuda.launcher import THREADS, Launcher, ceil_div
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


class CudaLinear:
    """The product's integer sums are exact, so every kernel gives the same bits."""

    def __init__(self, launcher: Launcher, activations: str) -> None:
        self._launcher = launcher
        self._activations = activations
        #: INT8 rows of a token: 16-bit activations are split into hi and lo.
        self._parts = 2 if activations == "int16" else 1

    def product(self, x: Tensor, weight: QuantizedTensor | PlanesTensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias: [num_tokens, in_features] -> [num_tokens, out_features]."""
        return self.products(x, (weight,), bias)[0]

    def products(
        self, x: Tensor, weights: Sequence[QuantizedTensor | PlanesTensor], bias: Tensor | None = None
    ) -> list[Tensor]:
        """product() with each of some matrices, for which x is rounded to integers once."""
        if x.shape[1] > MAX_IN_FEATURES:
            whole = (each.joined() if isinstance(each, PlanesTensor) else each for each in weights)
            return [reference.linear(x, each, bias, self._activations) for each in whole]
        rows, token_scales = self._quantize(x)
        return [self._product(rows, token_scales, x, each, bias) for each in weights]

    def _product(
        self,
        rows: Tensor,
        token_scales: Tensor,
        x: Tensor,
        weight: QuantizedTensor | PlanesTensor,
        bias: Tensor | None,
    ) -> Tensor:
        """product(), with the integers of x."""
        num_tokens, in_features = x.shape
        if isinstance(weight, PlanesTensor) and not _can_join_while_loading(weight):
            weight = self._joined(weight)
        out_features = weight.out_features
        y = x.new_empty(num_tokens, out_features)
        if self._has_tensor_product(num_tokens, weight):
            self._tensor_product(rows, token_scales, weight, bias, y)
            return y
        if isinstance(weight, PlanesTensor):
            form, qweight, lower, is_aligned = "planes_", weight.upper, weight.lower, True
        else:
            form, qweight, lower = "", weight.qweight, None
            is_aligned = in_features % 16 == 0 and qweight.data_ptr() % 16 == 0
        kernel, grid = self._kernel(num_tokens, out_features, is_aligned)
        self._launcher.launch(
            f"{form}{kernel}_{self._parts}", grid, THREADS,
            rows, token_scales, num_tokens, rows.shape[1], qweight, lower, weight.scale, bias,
            in_features, out_features, y,
        )  # fmt: skip
        return y

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
        padded = ceil_div(in_features, ROW_UNIT) * ROW_UNIT
        rows = x.new_empty(num_tokens * self._parts, padded, dtype=torch.int8)
        token_scales = x.new_empty(num_tokens)
        self._launcher.launch(
            f"quantize_{self._parts}", (num_tokens,), THREADS,
            x, x.stride(0), in_features, padded, rows, token_scales,
        )  # fmt: skip
        return rows, token_scales

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


def _can_join_while_loading(planes: PlanesTensor) -> bool:
    """Whether 8 bytes of each plane can be read at once."""
    parts = (planes.upper,) if planes.lower is None else (planes.upper, planes.lower)
    return planes.shape[1] % 16 == 0 and all(part.data_ptr() % 8 == 0 for part in parts)
