"""PlanesTensor: a matrix of INT8 integers whose upper and lower four bits lie apart."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.expert_records import MatrixRecord, NumbersRecord
from penstock.kernels.operands import MAX_IN_FEATURES, QuantizedTensor

#: A byte that stands in for two inputs of a lower plane that is not there: the middle of a step of the upper
#: plane.
HALF_STEPS = 0x88


class _Planes(NamedTuple):
    upper: Tensor  # uint8 [out_features, in_features / 2]: byte i has input 2 i in its low half
    lower: Tensor | None  # the same; None: 8 in every place
    scale: Tensor  # float32 [out_features] or [out_features, num_groups], contiguous


class PlanesTensor(_Planes):
    """A matrix of INT8 integers, symmetric: w = scale * q, with q = 16 * (upper - 8) + lower. A scale belongs
    to an output channel or to a group of the channel's inputs. With both planes the integers are those of a
    QuantizedTensor, to the last bit. Without the lower plane, each integer is the middle of the 16 that it
    may have been: a matrix of half the bytes, near the whole one."""

    @classmethod
    def of(cls, matrix: QuantizedTensor) -> PlanesTensor:
        """A matrix of INT8 in planes. The number of inputs has to be even."""
        return cls(*split(matrix.qweight), matrix.scale)

    @functools.cached_property
    def native(self) -> tuple[int, int, int, int, int, int]:
        """out_features, num_groups, the addresses of upper, lower and scale, and the bytes from a row of the
        lower plane to the next, for compiled kernels of the host. A lower plane that is not there is one row
        for all channels."""
        lower = half_steps(self.upper.shape[1], self.upper.device) if self.lower is None else self.lower
        return (
            self.out_features, self.num_groups, self.upper.data_ptr(), lower.data_ptr(),
            self.scale.data_ptr(), 0 if self.lower is None else self.upper.shape[1],
        )  # fmt: skip

    @functools.cached_property
    def record(self) -> MatrixRecord | None:
        """The same for compiled kernels that take records; None: the rows are too wide for them."""
        out_features, num_groups, upper, lower, scale, lower_bytes = self.native
        numbers, in_features = NumbersRecord(scale=scale, block_groups=1), self.shape[1]
        if in_features > MAX_IN_FEATURES:
            return None
        return MatrixRecord(upper, None, numbers, num_groups, in_features, out_features, lower, lower_bytes)

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.upper.shape[0], 2 * self.upper.shape[1]

    @property
    def num_groups(self) -> int:
        return 1 if self.scale.dim() == 1 else self.scale.shape[1]

    @property
    def out_features(self) -> int:
        return self.upper.shape[0]

    def upper_alone(self) -> PlanesTensor:
        """The matrix without its lower plane."""
        return PlanesTensor(self.upper, None, self.scale)

    def with_lower(self, lower: Tensor) -> PlanesTensor:
        """The matrix with this lower plane, uint8 [out_features, in_features / 2]."""
        return PlanesTensor(self.upper, lower, self.scale)

    def rows(self, start: int, stop: int) -> PlanesTensor:
        """A view of the output channels from `start` to `stop`."""
        return self.map(lambda part: part[start:stop])

    def look_up(self, row_ids: Tensor) -> Tensor:
        """Rows (int64 [num_rows]) as float32 [num_rows, in_features]."""
        return self.map(lambda part: part[row_ids]).dequantize()

    def map(self, function: Callable[[Tensor], Tensor]) -> PlanesTensor:
        """The matrix with `function` applied to each of its tensors."""
        lower = None if self.lower is None else function(self.lower)
        return PlanesTensor(function(self.upper), lower, function(self.scale))

    def joined(self) -> QuantizedTensor:
        """The matrix as INT8."""
        lower = half_steps(self.upper.shape[1], self.upper.device) if self.lower is None else self.lower
        return QuantizedTensor(join(self.upper, lower), self.scale)

    def dequantize(self) -> Tensor:
        """The matrix as float32 [out_features, in_features]."""
        return self.joined().dequantize()


@functools.cache
def half_steps(row_bytes: int, device: torch.device) -> Tensor:
    """A row of a lower plane that has 8 in every place: uint8 [row_bytes]."""
    return torch.full((row_bytes,), HALF_STEPS, dtype=torch.uint8, device=device)


def split(qweight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [rows, inputs] -> upper and lower plane, each uint8 [rows, inputs / 2]."""
    pairs = (qweight ^ -128).view(torch.int16)  # q + 128 as unsigned bytes, two inputs in a word
    upper = (pairs >> 4 & 0x0F) | (pairs >> 8 & 0xF0)
    lower = (pairs & 0x0F) | (pairs >> 4 & 0xF0)
    return upper.to(torch.uint8), lower.to(torch.uint8)


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """Planes -> int8 [rows, inputs]. The lower plane may be one row for all."""
    even = upper << 4 | lower & 0x0F
    odd = upper & 0xF0 | lower >> 4
    return torch.stack((even, odd), dim=-1).flatten(1).view(torch.int8) ^ -128
