"""Matrices of codes as Penstock's own converted folders have them where compressed-tensors has no name for
their form (gpt-oss's MXFP4, GGUF's blocks, our own codes of 3 and 2 bits): the arrays of Int4Tensor, each
under the matrix's name and an ending. The arrays tell the form: their shapes the groups and blocks, the
ending of the codes the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from penstock.config import LOW_GROUP_SIZES
from penstock.errors import WrongTensor
from penstock.kernels.low_codes import CODE_BITS, row_bytes
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.int4_form import Int4Form, Minima
from penstock.weights.checkpoints.quantized.packed_int4 import (
    STEPS,
    UNITS,
    int4_entry,
    units_and_steps,
    zero_points,
)
from penstock.weights.checkpoints.tensor_entry import ARRAY_DTYPES, TensorEntry

#: What follows a matrix's name in the names of its codes, by the table; other tables have PLAIN.
PLAIN = "_packed"
TABLES = {name: f"_{name}" for name in ("mxfp4", "iq1", "iq2", "iq3_xxs", "iq3_s", "iq4_nl")}
#: The same of codes of 3 and 2 bits, by the table and the size of groups, which their arrays don't tell.
LOW = {(name, size): f"_{name}_{size}" for name in CODE_BITS for size in LOW_GROUP_SIZES}
#: Other arrays: the field of Int4Tensor by the ending.
FIELDS = {
    "_scale": "scale",
    "_minimum": "minimum",
    "_sub_scale": "sub_scale",
    "_sub_minimum": "sub_minimum",
    "_order": "order",
}
#: The same of matrices with units and steps, whose scales are for other tools.
IN_STEPS = {UNITS: "scale", STEPS: "sub_scale"}
#: Eight rows of zero points in a word; a field of Int4Tensor has one in a byte.
ZERO_POINTS = "_zero_point"


def ending(form: Int4Form) -> str:
    """What follows a matrix's name in the name of its codes."""
    if form.bits < 4:
        return LOW[form.codebook, form.group_size]
    return TABLES.get(form.codebook, PLAIN)


def codes_entries(checkpoint: Checkpoint) -> Iterator[TensorEntry]:
    """The checkpoint's tensors, and a matrix for each array of codes. Raises WrongTensor."""
    for entry in checkpoint.entries.values():
        yield entry
        for codebook, last in {"": PLAIN, **TABLES}.items():
            if entry.dtype == "I32" and entry.name.endswith(last):
                name = entry.name.removesuffix(last)
                stored = StoredCodes.of(checkpoint, name, entry, codebook)
                yield int4_entry(name, entry, (entry.shape[0], 8 * entry.shape[1]), stored)
        for (codebook, size), last in LOW.items():
            if entry.dtype == "I32" and entry.name.endswith(last):
                stored = StoredCodes.low(checkpoint, entry, last, Int4Form(size, "BF16", codebook=codebook))
                width = size * stored.others[STEPS].shape[1]
                yield int4_entry(entry.name.removesuffix(last), entry, (entry.shape[0], width), stored)


@dataclass(frozen=True)
class StoredCodes:
    """A matrix whose arrays lie in a file."""

    form: Int4Form
    codes: TensorEntry  # I32 [out_features, in_features / 8]
    #: By the ending of the name.
    others: dict[str, TensorEntry] = field(hash=False)

    @classmethod
    def of(cls, checkpoint: Checkpoint, name: str, codes: TensorEntry, codebook: str) -> StoredCodes:
        """Raises WrongTensor."""
        found = {last: checkpoint.entries.get(name + last) for last in (*FIELDS, ZERO_POINTS)}
        others = {last: entry for last, entry in found.items() if entry is not None}
        scale, groups = others.get("_scale"), others.get("_sub_scale")
        if (
            len(codes.shape) != 2
            or scale is None
            or any(len(entry.shape) not in (1, 2) for entry in found.values() if entry)
        ):
            raise _misfit(codes)
        num_blocks = scale.shape[-1]
        num_groups = groups.shape[-1] if groups is not None else num_blocks
        if not num_blocks or num_groups % num_blocks or 8 * codes.shape[1] % num_groups:
            raise _misfit(codes)
        minima: Minima = "none"
        if "_minimum" in others:
            minima = "numbers"
        elif ZERO_POINTS in others or "_sub_minimum" in others:
            minima = "zero_points"
        form = Int4Form(
            8 * codes.shape[1] // num_groups,
            scale.dtype,
            num_groups // num_blocks,
            minima,
            codebook or ("signed" if minima == "none" else "unsigned"),
            "_order" in others,
        )
        made = cls(form, codes, others)
        made._check(num_blocks, num_groups)
        if (in_steps := units_and_steps(checkpoint, name, scale)) is None:
            return made
        return cls(replace(form, has_steps=True), codes, dict(zip((UNITS, STEPS), in_steps, strict=True)))

    @classmethod
    def low(cls, checkpoint: Checkpoint, codes: TensorEntry, last: str, form: Int4Form) -> StoredCodes:
        """A matrix in codes of 3 or 2 bits, whose names end with `last`. Raises MissingTensor and
        WrongTensor."""
        name, rows = codes.name.removesuffix(last), codes.shape[0]
        units, steps = checkpoint.entry(name + UNITS), checkpoint.entry(name + STEPS)
        if (units.dtype, units.shape) != ("BF16", (rows, 1)):
            raise _misfit(units)
        if steps.dtype != "I8" or len(steps.shape) != 2 or steps.shape[0] != rows or not steps.shape[1]:
            raise _misfit(steps)
        if codes.shape != (rows, row_bytes(form.group_size * steps.shape[1], form.bits) // 4):
            raise _misfit(codes)
        return cls(replace(form, has_steps=True), codes, {UNITS: units, STEPS: steps})

    def _check(self, num_blocks: int, num_groups: int) -> None:
        """Raises WrongTensor for an array of another shape or dtype."""
        rows, width, dtype = self.codes.shape[0], 8 * self.codes.shape[1], self.form.scale_dtype
        expected = {
            "_scale": (dtype, (rows, num_blocks)),
            "_minimum": (dtype, (rows, num_blocks)),
            "_sub_scale": ("I8", (rows, num_groups)),
            "_sub_minimum": ("U8", (rows, num_groups)),
            "_order": ("I32", (width,)),
            ZERO_POINTS: ("I32", (-(-rows // 8), num_groups)),
        }
        for last, entry in self.others.items():
            if (entry.dtype, entry.shape) != expected[last] or dtype not in ("F32", "F16", "BF16"):
                raise _misfit(entry)

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> dict[str, Tensor]:
        codes = _rows(checkpoint, self.codes, start, stop).view(torch.uint8)
        found = {"codes": codes}
        for last, entry in self.others.items():
            if last == ZERO_POINTS:
                found["sub_minimum"] = zero_points(checkpoint, entry, start, stop)
            elif last == "_order":
                found["order"] = _rows(checkpoint, entry, 0, entry.shape[0])
            else:
                found[(FIELDS | IN_STEPS)[last]] = _rows(checkpoint, entry, start, stop)
        return found


def _rows(checkpoint: Checkpoint, entry: TensorEntry, start: int, stop: int) -> Tensor:
    row_bytes = entry.num_bytes // entry.shape[0]
    stored = checkpoint.read_stored(entry, start * row_bytes, stop * row_bytes)
    return stored.view(ARRAY_DTYPES[entry.dtype]).view(stop - start, *entry.shape[1:])


def _misfit(entry: TensorEntry) -> WrongTensor:
    return WrongTensor(
        f"tensor {entry.name} in {entry.file} is {entry.dtype} {list(entry.shape)}, which does not fit the "
        "other arrays of its matrix. Convert the model again"
    )
