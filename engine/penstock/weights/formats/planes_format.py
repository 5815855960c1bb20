"""UpperPlane and LowerPlane: the weight formats of the two halves of a matrix in INT8, which lie in two units
of a layer. Both halves together are the matrix that Int8 makes of the same tensor, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from penstock.kernels import PlanesTensor
from penstock.kernels.operands import QuantizedTensor
from penstock.kernels.planes_tensor import split
from penstock.weights.checkpoints.quantized.planes import LOWER, UPPER
from penstock.weights.checkpoints.tensor_entry import TensorEntry
from penstock.weights.formats.weight_format import (
    CHUNK_BYTES,
    Component,
    Int8,
    Loss,
    copy_scales,
    rows_of_parts,
    stored_rows,
)
from penstock.weights.quantize import row_quantizer
from penstock.weights.tensor_quantizer import TensorQuantizer
from penstock.weights.tensor_source import TensorSource, is_transposed

if TYPE_CHECKING:
    from penstock.weights.tensors import TensorSpec


@dataclass(frozen=True)
class _Half:
    """What both planes have of the whole matrix."""

    group_size: int = 0

    @property
    def whole(self) -> Int8:
        """The format that has both halves."""
        return Int8(self.group_size)

    def holds(self, entry: TensorEntry) -> bool:
        return self.whole.holds(entry)

    def scheme(self) -> dict[str, Any] | None:
        return None

    def check(self, source: TensorSource, tensor: TensorSpec) -> set[str]:
        return self.whole.check(source, tensor)

    def dequantize(self, source: TensorSource, part: str, exact: Tensor) -> Tensor:
        return self.whole.dequantize(source, part, exact)


@dataclass(frozen=True)
class UpperPlane(_Half):
    """The upper four bits of INT8, and the scales. The lower bits are not there: the matrix alone has the
    middle of each step (PlanesTensor)."""

    is_matrix: ClassVar[bool] = True
    operand_types: ClassVar[tuple[type, ...]] = (PlanesTensor,)
    can_be_split: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"{self.whole.name} in planes"

    def components(self, shape: tuple[int, ...]) -> tuple[Component, ...]:
        return self.whole.components(shape)[0], _plane(UPPER, shape)

    def operand(self, arrays: Sequence[Tensor]) -> PlanesTensor:
        scale, upper = arrays
        return PlanesTensor(upper, None, scale)

    def grouped(self, tensor: TensorSpec, group_size: int) -> UpperPlane:
        return UpperPlane(group_size)

    def fill(
        self,
        source: TensorSource,
        tensor: TensorSpec,
        arrays: Sequence[Tensor],
        num_threads: int = 1,
        with_loss: bool = False,
    ) -> dict[str, Loss]:
        scale, upper = arrays
        return _fill(source, tensor, _Plane(upper, scale, self.group_size, True), num_threads, with_loss)

    def from_rows(self, rows: Tensor) -> PlanesTensor:
        return PlanesTensor.of(self.whole.from_rows(rows))

    def fill_random(self, arrays: Sequence[Tensor], generator: torch.Generator) -> None:
        scale, upper = arrays
        upper.random_(0, 256, generator=generator)
        scale.fill_(1 / (73 * (2 * upper.shape[1]) ** 0.5))


@dataclass(frozen=True)
class LowerPlane(_Half):
    """The lower four bits of INT8. No token is multiplied by them alone."""

    is_matrix: ClassVar[bool] = False
    operand_types: ClassVar[tuple[type, ...]] = (Tensor,)
    can_be_split: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"{self.whole.name}, lower plane"

    def components(self, shape: tuple[int, ...]) -> tuple[Component, ...]:
        return (_plane(LOWER, shape),)

    def operand(self, arrays: Sequence[Tensor]) -> Tensor:
        return arrays[0]

    def grouped(self, tensor: TensorSpec, group_size: int) -> LowerPlane:
        return LowerPlane(group_size)

    def fill(
        self,
        source: TensorSource,
        tensor: TensorSpec,
        arrays: Sequence[Tensor],
        num_threads: int = 1,
        with_loss: bool = False,
    ) -> dict[str, Loss]:
        _fill(source, tensor, _Plane(arrays[0], None, self.group_size, False), num_threads)
        return {}  # the upper plane has told the loss

    def from_rows(self, rows: Tensor) -> PlanesTensor:
        raise TypeError("a lower plane is no matrix")

    def fill_random(self, arrays: Sequence[Tensor], generator: torch.Generator) -> None:
        arrays[0].random_(0, 256, generator=generator)


def _plane(suffix: str, shape: tuple[int, ...]) -> Component:
    rows, width = shape
    return Component(suffix, "U8", (rows, width // 2), (width // 2,))


class _Plane(NamedTuple):
    """One half of a matrix, as a target of quantizing."""

    codes: Tensor  # uint8 [out_features, in_features / 2]
    scale: Tensor | None  # of the upper plane: [out_features] or [out_features, num_groups]
    group_size: int
    is_upper: bool

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    def rows(self, start: int, stop: int) -> _Plane:
        scale = None if self.scale is None else self.scale[start:stop]
        return self._replace(codes=self.codes[start:stop], scale=scale)

    def take(self, qweight: Tensor) -> None:
        """Keep this half of integers."""
        self.codes.copy_(split(qweight)[0 if self.is_upper else 1])


class _PlaneQuantizer:
    """Quantizes rows to INT8, and keeps a plane."""

    def __init__(self) -> None:
        self._whole = row_quantizer()
        self._integers = QuantizedTensor(torch.empty(0), torch.empty(0))

    def quantize(self, weight: Tensor, out: _Plane) -> None:
        """Raises ValueError for NaN or infinity."""
        rows, width = out.shape
        groups = (width // out.group_size,) if out.group_size else ()
        scale = torch.empty(rows, *groups) if out.scale is None else out.scale
        self._integers = QuantizedTensor(torch.empty(rows, width, dtype=torch.int8), scale)
        self._whole.quantize(weight, self._integers)
        out.take(self._integers.qweight)

    def loss(self, out: _Plane) -> tuple[float, float]:
        return self._whole.loss(self._integers)


def _fill(
    source: TensorSource, tensor: TensorSpec, whole: _Plane, num_threads: int, with_loss: bool = False
) -> dict[str, Loss]:
    """Fill one half of a matrix, whatever the checkpoint holds."""
    losses: dict[str, Loss] = {}
    for part, entry, start, end in rows_of_parts(source, tensor):
        rows = whole.rows(start, end)
        if tensor.format.holds(entry):
            _copy(source, part, rows, num_threads)
            continue
        is_turned = is_transposed(tensor, entry)
        quantizer = TensorQuantizer(source.checkpoint, entry, rows, _PlaneQuantizer, is_turned)
        loss = Loss(*quantizer.run(num_threads, with_loss))
        source.count(entry.num_bytes)
        losses |= {part: loss} if with_loss else {}
    return losses


def _copy(source: TensorSource, part: str, rows: _Plane, num_threads: int) -> None:
    """Keep a half of the integers that the checkpoint holds, and its scales."""
    step = max(1, CHUNK_BYTES // rows.shape[1])

    def take(start: int) -> None:
        chunk = rows.rows(start, start + step)
        integers, scales = stored_rows(source, part, start, start + chunk.out_features)
        chunk.take(integers)
        if chunk.scale is not None and scales is not None:
            chunk.scale.copy_(scales)

    starts = range(0, rows.out_features, step)
    with ThreadPoolExecutor(max(1, min(num_threads, len(starts))), "penstock-planes") as pool:
        list(pool.map(take, starts))
    if rows.scale is not None:
        copy_scales(source, part, rows.scale)
