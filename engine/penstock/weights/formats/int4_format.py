"""Int4: the weight format of matrices with codes of 4 bits, or of 3 or 2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from penstock.errors import WrongTensor
from penstock.kernels import Int4Tensor
from penstock.kernels.int4_tensor import CODEBOOKS
from penstock.kernels.low_codes import row_bytes
from penstock.weights.checkpoints.int4_form import Int4Form
from penstock.weights.checkpoints.quantized import codes
from penstock.weights.checkpoints.quantized.nibbles import pack_rows, unpack_rows, words_form
from penstock.weights.checkpoints.quantized.packed_int4 import STEPS, UNITS
from penstock.weights.checkpoints.tensor_entry import TensorEntry
from penstock.weights.formats.weight_format import (
    CHUNK_BYTES,
    Component,
    Loss,
    check_shape,
    quantized,
    rows_of_parts,
)
from penstock.weights.tensor_source import TensorSource, is_transposed

if TYPE_CHECKING:
    from penstock.weights.tensors import TensorSpec

#: What follows a weight's name in the files of those who pack 4 bits (compressed-tensors, converted folders).
_ENDINGS = (
    "_packed", "_shape", "_zero_point", "_g_idx", UNITS, STEPS, *codes.FIELDS, *codes.TABLES.values(),
    *codes.LOW.values(),
)  # fmt: skip
#: The form of matrices that Penstock quantizes itself: of each group size, one.
OWN_DTYPE = "BF16"
#: How far apart the exponents of a random MXFP4 matrix are.
MXFP4_SPREAD = 3
#: Rows whose zero points lie in a word, in files.
WORD_ROWS = 8


@dataclass(frozen=True)
class Int4:
    """Codes of 4 bits, or of 3 or 2, with a scale per group of inputs. Matrices of a floating dtype are
    quantized while they are read, where the form is that of our own quantization (symmetric, units in
    bfloat16, and steps)."""

    form: Int4Form
    is_matrix: ClassVar[bool] = True
    operand_types: ClassVar[tuple[type, ...]] = (Int4Tensor,)
    can_be_split: ClassVar[bool] = True

    @property
    def name(self) -> str:
        if self.form.bits < 4:
            return f"{self.form.codebook}, groups of {self.form.group_size}"
        kind = "" if self.form.codebook in ("signed", "unsigned") else f" {self.form.codebook}"
        kind += {"none": "", "zero_points": " with zero points", "numbers": " with minima"}[self.form.minima]
        return f"int4{kind}, groups of {self.form.group_size}"

    @property
    def group_size(self) -> int:
        return self.form.group_size

    def components(self, shape: tuple[int, ...]) -> tuple[Component, ...]:
        form, (rows, width) = self.form, shape
        groups = width // form.group_size
        if form.has_steps:
            units = Component(UNITS, form.scale_dtype, (rows, 1), (1,))
            steps = Component(STEPS, "I8", (rows, groups), (groups,))
            return units, steps, self._codes(shape)
        blocks = groups // form.block_groups
        found = [Component("_scale", form.scale_dtype, (rows, blocks), (blocks,))]
        if form.minima == "numbers":
            found.append(Component("_minimum", form.scale_dtype, (rows, blocks), (blocks,)))
        if form.block_groups > 1:
            found.append(Component("_sub_scale", "I8", (rows, groups), (groups,)))
        has_words = _has_words(self.form, shape)
        if has_words:
            found.append(Component("_zero_point", "I32", (rows // WORD_ROWS, groups), (groups,)))
        if form.has_sub_minimum:
            derive = unpack_rows if has_words else None
            found.append(Component("_sub_minimum", "U8", (rows, groups), (groups,), derive))
        if form.is_permuted:
            found.append(Component("_order", "I32", (width,), ()))
        return *found, self._codes(shape)

    def _codes(self, shape: tuple[int, ...]) -> Component:
        """int32 words of eight codes, as compressed-tensors has them; their bytes are pairs of codes. Those
        of fewer bits lie as low_codes.py says."""
        bits = self.form.bits
        rows, words = shape[0], row_bytes(shape[1], bits) // 4 if bits < 4 else shape[1] // 8
        return Component(codes.ending(self.form), "I32", (rows, words), (words,))

    def scales(self, shape: tuple[int, ...]) -> Component:
        """The scales of a matrix with steps, as other tools want them."""
        groups = shape[1] // self.group_size
        return Component("_scale", self.form.scale_dtype, (shape[0], groups), (groups,))

    def operand(self, arrays: Sequence[Tensor]) -> Int4Tensor:
        form, left = self.form, list(arrays)
        shape = left[-1].shape[0], 8 * left[-1].shape[1]
        fields: dict[str, Tensor] = {"scale": left.pop(0)}
        if form.minima == "numbers":
            fields["minimum"] = left.pop(0)
        if form.has_sub_scale:
            fields["sub_scale"] = left.pop(0)
        if _has_words(self.form, shape):
            left.pop(0)
        if form.has_sub_minimum:
            fields["sub_minimum"] = left.pop(0)
        if form.is_permuted:
            fields["order"] = left.pop(0)
        pairs = left.pop(0).view(torch.uint8)
        return Int4Tensor(pairs, group_size=form.group_size, codebook=form.codebook, **fields)

    def holds(self, entry: TensorEntry) -> bool:
        return entry.int4 is not None and entry.int4.form == self.form

    def grouped(self, tensor: TensorSpec, group_size: int) -> Int4:
        return Int4(replace(self.form, group_size=group_size))

    def scheme(self) -> dict[str, Any] | None:
        size, dtype = self.form.group_size, self.form.scale_dtype
        form = replace(self.form, has_steps=False)
        if form not in [words_form(size, dtype, has_zero_points) for has_zero_points in (False, True)]:
            return None
        return {
            "num_bits": 4,
            "type": "int",
            "symmetric": self.form.minima == "none",
            "strategy": "group",
            "group_size": self.group_size,
            "dynamic": False,
        }

    def check(self, source: TensorSource, tensor: TensorSpec) -> set[str]:
        names = set()
        for part in tensor.parts:
            entry = source.entry(part)
            check_shape(tensor, entry)
            if not self.holds(entry) and not _is_own(self.form):
                raise WrongTensor(f"tensor {entry.name} in {entry.file} is not kept as {self.name}")
            names |= {entry.name, *(entry.name + ending for ending in _ENDINGS if self.holds(entry))}
        return names

    def fill(
        self,
        source: TensorSource,
        tensor: TensorSpec,
        arrays: Sequence[Tensor],
        num_threads: int = 1,
        with_loss: bool = False,
    ) -> dict[str, Loss]:
        from penstock.weights.quantize_int4 import Int4RowQuantizer
        from penstock.weights.tensor_quantizer import TensorQuantizer

        whole, losses = self.operand(arrays), dict[str, Loss]()
        for part, entry, start, end in rows_of_parts(source, tensor):
            rows = whole.rows(start, end)
            if self.holds(entry):
                _copy(source, entry, rows, num_threads)
                continue
            quantizer = TensorQuantizer(
                source.checkpoint, entry, rows, Int4RowQuantizer, is_transposed(tensor, entry)
            )
            losses |= quantized(source, part, entry, quantizer, num_threads, with_loss)
        if _has_words(self.form, tensor.shape):
            assert whole.sub_minimum is not None
            arrays[1].copy_(pack_rows(whole.sub_minimum))
        return losses

    def dequantize(self, source: TensorSource, part: str, exact: Tensor) -> Tensor:
        return exact  # the entry has made floats of the codes

    def from_rows(self, rows: Tensor) -> Int4Tensor:
        from penstock.weights.quantize_int4 import CODES, quantize_int4

        return quantize_int4(rows, self.group_size, CODES[self.form.codebook])

    def fill_random(self, arrays: Sequence[Tensor], generator: torch.Generator) -> None:
        from penstock.weights.quantize_int4 import CODES

        matrix = self.operand(arrays)
        matrix.codes.random_(0, 256, generator=generator)
        for name, value in (("sub_scale", 1), ("sub_minimum", 8), ("minimum", 0.0)):
            if (array := getattr(matrix, name)) is not None:
                array.fill_(value)
        if matrix.order is not None:
            matrix.order.copy_(torch.randperm(matrix.shape[1], generator=generator))
        integers = CODEBOOKS[self.form.codebook][: 1 << self.form.bits]
        spread = float(torch.tensor(integers).double().std())
        usual = 1 / (spread * matrix.shape[1] ** 0.5)
        matrix.scale.fill_(usual)
        if self.form.codebook == "mxfp4":  # powers of two, of which the largest is usual
            matrix.scale.random_(-MXFP4_SPREAD, 1, generator=generator).exp2_()
            matrix.scale.mul_(2.0 ** round(math.log2(2 * usual)))
        if self.form.has_steps:
            assert matrix.sub_scale is not None
            most = CODES[self.form.codebook].most_steps
            matrix.scale.fill_(2.0 ** round(math.log2(usual / most)))
            matrix.sub_scale.random_(most // 2, most + 1, generator=generator)
            matrix.sub_scale[:, 0] = most


def _is_own(form: Int4Form) -> bool:
    """Whether Penstock quantizes matrices to this form itself."""
    own = form.codebook if form.bits < 4 else "signed"
    return form == Int4Form(form.group_size, OWN_DTYPE, codebook=own, has_steps=True)


def _has_words(form: Int4Form, shape: tuple[int, ...]) -> bool:
    """Whether zero points are there as files have them, too: eight rows in a word. Kernels want bytes."""
    return form.minima == "zero_points" and shape[0] % WORD_ROWS == 0


def _copy(source: TensorSource, entry: TensorEntry, rows: Int4Tensor, num_threads: int) -> None:
    """Copy codes and scales as the checkpoint holds them, some rows at a time. Files of other tools have them
    in other orders, so that threads gain."""
    assert (stored := entry.int4) is not None
    step = max(1, CHUNK_BYTES // rows.codes.shape[1])

    def copy(start: int) -> None:
        chunk = rows.rows(start, start + step)
        found = stored.read(source.checkpoint, start, start + chunk.out_features)
        for name, array in found.items():
            getattr(chunk, name).copy_(array)

    starts = range(0, rows.out_features, step)
    with ThreadPoolExecutor(max(1, min(num_threads, len(starts))), "penstock-codes") as pool:
        list(pool.map(copy, starts))
    source.count(entry.num_bytes)
