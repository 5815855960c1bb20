"""Int4Tensor: a matrix of 4-bit codes, or of 3 or 2 bits, with a scale for each group of inputs.
StackedMatrix: matrices of several formats, one below the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.expert_records import MatrixRecord, NumbersRecord
from penstock.kernels.low_codes import CODE_BITS, MOST_STEPS, unpack_low
from penstock.kernels.operands import MAX_IN_FEATURES, Matrix

#: The integer that each code stands for. "signed" is the usual offset code of symmetric formats. "unsigned"
#: belongs to formats with minima. "mxfp4" is twice E2M1 (OCP Microscaling Formats 1.0), whose scale is halved
#: therefore; "iq4_nl" is llama.cpp's table of unevenly spaced integers. Those of its grids have
#: magnitudes first, then the same with a minus; "iq1" is 8 times -1, 0 and 1, plus 1, then minus 1.
CODEBOOKS: dict[str, tuple[int, ...]] = {
    "signed": tuple(range(-8, 8)),
    "unsigned": tuple(range(16)),
    "mxfp4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    "iq1": (-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0),
    "iq2": (8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0),
    "iq3_xxs": (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62),
    "iq3_s": (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15),
    "iq4_nl": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "int3": (*range(-4, 4), *(0,) * 8),
    "int2": (*range(-2, 2), *(0,) * 12),
}
#: The same as bytes, for compiled kernels.
CODEBOOK_BYTES = {name: bytes(value & 255 for value in values) for name, values in CODEBOOKS.items()}
#: Numbers by which compiled kernels know the dtypes of scales.
SCALE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class _Int4Parts(NamedTuple):
    #: uint8 [out_features, in_features / 2]: byte i has input 2 i in its low half. Those of "int3" and "int2"
    #: lie in blocks: low_codes.py.
    codes: Tensor
    scale: Tensor  # float32, float16 or bfloat16 [out_features, num_blocks]
    group_size: int
    codebook: str = "signed"
    minimum: Tensor | None = None  # of scale's dtype and shape
    sub_scale: Tensor | None = None  # int8 [out_features, num_groups]
    sub_minimum: Tensor | None = None  # uint8 [out_features, num_groups]
    #: int32 [in_features]: column i of the matrix belongs to input order[i]. None: the inputs' own order.
    order: Tensor | None = None


class Int4Tensor(_Int4Parts):
    """A matrix of 4-bit codes: w = scale[group] * integer[code] - minimum[group].

    Without `sub_scale`, `scale` has one number for each group. With it, `scale` has one number for each block
    of several groups, and a group's scale is scale * sub_scale. A group's minimum is `minimum` (of its
    block), times `sub_minimum` where there is one. Where only `sub_minimum` is there, it is the group's zero
    point: the minimum is scale * sub_minimum. Scales of blocks have 16 bits, so that every such product is
    exact in float32.

    Codes of 3 and 2 bits ("int3", "int2") come with `sub_scale` alone, and a row is one block. A step beyond
    MOST_STEPS counts as that, so that any bytes are a matrix.
    """

    @cached_property
    def native(self) -> tuple[int | None, ...]:
        """What compiled kernels of the host take of the matrix: addresses of codes, scale, minimum, sub_scale
        and sub_minimum, the code of the scales' dtype, bits of a code, groups in a block, groups,
        out_features. The addresses are asked for once, as those of a QuantizedTensor are."""
        parts = (self.codes, self.scale, self.minimum, self.sub_scale, self.sub_minimum)
        addresses = (None if part is None else part.data_ptr() for part in parts)
        per_block = self.num_groups // self.scale.shape[1]
        dtype = SCALE_CODES[self.scale.dtype]
        return *addresses, dtype, self.bits, per_block, self.num_groups, self.out_features

    @cached_property
    def record(self) -> MatrixRecord | None:
        """The same for compiled kernels of experts; None: the columns have an order of their own, or rows are
        too wide for them."""
        codes, scale, minimum, sub_scale, sub_minimum, dtype, bits, per_block, num_groups, rows = self.native
        in_features = self.shape[1]
        if self.order is not None or in_features > MAX_IN_FEATURES:
            return None
        numbers = NumbersRecord(scale, minimum, sub_scale, sub_minimum, per_block, dtype, bits)
        return MatrixRecord(codes, CODEBOOK_BYTES[self.codebook], numbers, num_groups, in_features, rows)

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.codes.shape[0], self.num_groups * self.group_size

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return CODE_BITS.get(self.codebook, 4)

    @property
    def num_groups(self) -> int:
        if self.bits < 4:
            assert self.sub_scale is not None
            return self.sub_scale.shape[1]
        return 2 * self.codes.shape[1] // self.group_size

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def has_minimum(self) -> bool:
        return self.minimum is not None or self.sub_minimum is not None

    def rows(self, start: int, stop: int) -> Int4Tensor:
        """A view of the output channels from `start` to `stop`."""
        cut = self._replace(order=None).map(lambda tensor: tensor[start:stop])
        return cut._replace(order=self.order)

    def look_up(self, row_ids: Tensor) -> Tensor:
        """Rows (int64 [num_rows]) as float32 [num_rows, in_features]."""
        chosen = self._replace(order=None).map(lambda tensor: tensor[row_ids])
        return chosen._replace(order=self.order).dequantize()

    def map(self, function: Callable[[Tensor], Tensor]) -> Int4Tensor:
        """The matrix with `function` applied to each of its tensors."""
        fields: dict[str, Any] = self._asdict()
        for name, field in fields.items():
            if isinstance(field, Tensor):
                fields[name] = function(field)
        return Int4Tensor(**fields)

    def integers(self) -> Tensor:
        """The integers that the codes stand for: int8 [out_features, in_features], in the order of the
        columns."""
        table = torch.tensor(CODEBOOKS[self.codebook], dtype=torch.int8, device=self.codes.device)
        if self.bits < 4:
            return table[unpack_low(self.codes, self.bits, self.shape[1]).int()]
        halves = torch.stack((self.codes & 15, self.codes >> 4), dim=-1)
        return table[halves.flatten(1).int()]

    def group_scales(self) -> tuple[Tensor, Tensor | None]:
        """The scale and the minimum of each group, exact: float64 [out_features, num_groups]. None: no
        minima."""
        repeats = self.num_groups // self.scale.shape[1]
        scale = self.scale.double().repeat_interleave(repeats, 1)
        minimum = None
        if self.has_minimum:
            minimum = scale if self.minimum is None else self.minimum.double().repeat_interleave(repeats, 1)
            minimum = minimum if self.sub_minimum is None else minimum * self.sub_minimum
        return scale if self.sub_scale is None else scale * self._steps(self.sub_scale), minimum

    def _steps(self, sub_scale: Tensor) -> Tensor:
        if (most := MOST_STEPS.get(self.bits)) is None:
            return sub_scale
        return sub_scale.clamp(-most, most)

    def in_nibbles(self) -> Int4Tensor:
        """The same matrix in 4 bits, for kernels that know no fewer: the integers of fewer bits are among
        those of "signed"."""
        if self.bits == 4:
            return self
        codes = (self.integers() + 8).to(torch.uint8)
        assert self.sub_scale is not None
        pairs = codes[:, 0::2] | codes[:, 1::2] << 4
        return Int4Tensor(pairs, self.scale, self.group_size, sub_scale=self._steps(self.sub_scale))

    def dequantize(self) -> Tensor:
        """The matrix as float32 [out_features, in_features], the inputs in their own order. Each element
        rounds once."""
        scale, minimum = self.group_scales()
        exact = self.integers().double() * scale.repeat_interleave(self.group_size, 1)
        if minimum is not None:
            exact -= minimum.repeat_interleave(self.group_size, 1)
        values = exact.float()
        return values if self.order is None else values[:, torch.argsort(self.order)]


class StackedMatrix(NamedTuple):
    """Matrices with the same inputs, one below the other, each in its own format: for example q, k and v
    where a checkpoint keeps v with more bits."""

    parts: tuple[Matrix, ...]

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    def rows(self, start: int, stop: int) -> StackedMatrix:
        """A view of the output channels from `start` to `stop`."""
        cut, first = [], 0
        for part in self.parts:
            begin, end = max(start - first, 0), min(stop - first, part.out_features)
            cut += [part.rows(begin, end)] if begin < end else []
            first += part.out_features
        return StackedMatrix(tuple(cut))

    def look_up(self, row_ids: Tensor) -> Tensor:
        """Rows (int64 [num_rows]) as float32 [num_rows, in_features]."""
        return self.dequantize()[row_ids]

    def map(self, function: Callable[[Tensor], Tensor]) -> StackedMatrix:
        """The matrix with `function` applied to each of its tensors."""
        return StackedMatrix(tuple(part.map(function) for part in self.parts))

    def dequantize(self) -> Tensor:
        """The matrix as float32 [out_features, in_features]."""
        return torch.cat([part.dequantize() for part in self.parts])

    def product(
        self, linear: Callable[[Tensor, Matrix, Tensor | None], Tensor], x: Tensor, bias: Tensor | None
    ) -> Tensor:
        """x W^T + bias, by `linear` of each part."""
        sizes = [part.out_features for part in self.parts]
        biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
        return torch.cat([linear(x, *each) for each in zip(self.parts, biases, strict=True)], dim=1)
