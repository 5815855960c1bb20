"""4-bit codes in int32 words, as compressed-tensors' `pack-quantized` keeps them: eight to a word along the
rows of [out_features, in_features], the first in the lowest bits, each with 8 added. So a little-endian file
has rows of bytes with two codes each. Zero points lie in such words along the columns.

What Penstock quantizes itself has the scales a second time, as units and steps (quantize_int4.py), which
Penstock reads in place of the scales.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.config import GROUP_SIZES
from penstock.errors import WrongTensor
from penstock.kernels.int4_tensor import Int4Tensor
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.int4_form import Int4Form, Int4Source
from penstock.weights.checkpoints.quantized.nibbles import (
    EXACT_SCALE_DTYPES,
    SCALE_DTYPES,
    column_order,
    in_groups,
    shared_size,
    unpack,
    words_form,
)
from penstock.weights.checkpoints.quantized.packed import check_words
from penstock.weights.checkpoints.tensor_entry import TensorEntry

#: What follows the name of a matrix in the names of its units and steps. vLLM skips biases that it does not
#: know.
UNITS, STEPS = "_units.bias", "_steps.bias"


def int4_entry(name: str, stored: TensorEntry, shape: tuple[int, int], source: Int4Source) -> TensorEntry:
    """The entry of a matrix [out_features, in_features] of 4-bit codes. `stored` is the array with the
    codes."""
    decode = DequantizedRows(source).read
    return TensorEntry(
        name,
        stored.file,
        stored.offset,
        "F32",
        shape,
        stored.num_bytes,
        decode,
        has_outputs_first=True,
        int4=source,
    )


@dataclass(frozen=True)
class DequantizedRows:
    """A matrix of 4-bit codes as float32."""

    source: Int4Source

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """float32 [stop - start, in_features]."""
        form = self.source.form
        arrays = self.source.read(checkpoint, start, stop)
        return Int4Tensor(group_size=form.group_size, codebook=form.codebook, **arrays).dequantize()


@dataclass(frozen=True)
class CompressedInt4:
    """A matrix as compressed-tensors packs it."""

    packed: TensorEntry  # I32 [out_features, in_features / 8]
    scale: TensorEntry  # floating [out_features, num_groups]
    zero_point: TensorEntry | None  # I32 [out_features / 8, num_groups]; None: 8 everywhere
    #: I32 [in_features]: the group of each input, where the inputs of a group do not lie side by side.
    g_idx: TensorEntry | None
    form: Int4Form
    #: Units [out_features, 1] and steps (I8 [out_features, num_groups]), where the form has these.
    in_steps: tuple[TensorEntry, TensorEntry] | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint, name: str, has_zero_point: bool) -> CompressedInt4:
        """The matrix `name`, which has zero points in any case if `has_zero_point`. Raises MissingTensor and
        WrongTensor."""
        packed, scale = checkpoint.entry(f"{name}_packed"), checkpoint.entry(f"{name}_scale")
        zero, g_idx = (checkpoint.entries.get(f"{name}_{of}") for of in ("zero_point", "g_idx"))
        zero = checkpoint.entry(f"{name}_zero_point") if has_zero_point else zero
        check_words(packed)
        rows, width = packed.shape[0], 8 * packed.shape[1]
        size = shared_size(width, scale.shape[1] if len(scale.shape) == 2 else 0)
        dtypes = EXACT_SCALE_DTYPES if zero is not None else SCALE_DTYPES
        if scale.dtype not in dtypes or scale.shape[:1] != (rows,) or not size:
            raise _misfit(packed, scale, f"scales ({', '.join(dtypes)}) {_of_groups()}")
        if zero is not None and (zero.dtype != "I32" or zero.shape != (-(-rows // 8), scale.shape[1])):
            raise _misfit(packed, zero, f"zero points in words, for scales {list(scale.shape)}")
        if g_idx is not None and (g_idx.dtype != "I32" or g_idx.shape != (width,)):
            raise _misfit(packed, g_idx, "the group of each input (I32)")
        if g_idx is not None and _is_in_order(checkpoint, g_idx, scale.shape[1]):
            g_idx = None
        form = words_form(size, scale.dtype, zero is not None, is_permuted=g_idx is not None)
        in_steps = units_and_steps(checkpoint, name, scale)
        return cls(packed, scale, zero, g_idx, replace(form, has_steps=in_steps is not None), in_steps)

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> dict[str, Tensor]:
        width = 4 * self.packed.shape[1]
        codes = checkpoint.read_stored(self.packed, start * width, stop * width).view(stop - start, width)
        if self.in_steps is not None:
            units, steps = (entry.read_rows(checkpoint, start, stop) for entry in self.in_steps)
            return {"codes": codes, "scale": units, "sub_scale": steps}
        num_groups = self.scale.shape[1]
        repeats = 2 * width // self.form.group_size // num_groups
        arrays = {"scale": self.scale.read_rows(checkpoint, start, stop).repeat_interleave(repeats, 1)}
        if self.zero_point is not None:
            zeros = zero_points(checkpoint, self.zero_point, start, stop)
            arrays["sub_minimum"] = zeros.repeat_interleave(repeats, 1)
        return arrays | in_groups(checkpoint, codes, self.g_idx, num_groups)


def units_and_steps(
    checkpoint: Checkpoint, name: str, scale: TensorEntry
) -> tuple[TensorEntry, TensorEntry] | None:
    """Those of the matrix `name`, whose scales `scale` are for other tools. None: it has none. Raises
    MissingTensor and WrongTensor."""
    if name + STEPS not in checkpoint.entries:
        return None
    units, steps = checkpoint.entry(name + UNITS), checkpoint.entry(name + STEPS)
    for entry, expected in ((units, (scale.dtype, (scale.shape[0], 1))), (steps, ("I8", scale.shape))):
        if (entry.dtype, entry.shape) != expected:
            raise _misfit(scale, entry, f"{expected[0]} {list(expected[1])}. Convert the model again")
    return units, steps


def _is_in_order(checkpoint: Checkpoint, g_idx: TensorEntry, num_groups: int) -> bool:
    """Whether the inputs of each group lie side by side. compressed-tensors fills g_idx with -1 where nobody
    has set it."""
    groups = checkpoint.read_stored(g_idx, 0, g_idx.num_bytes).view(torch.int32)
    return bool((groups == -1).all()) or column_order(checkpoint, g_idx, num_groups) is None


def zero_points(checkpoint: Checkpoint, entry: TensorEntry, start: int, stop: int) -> Tensor:
    """Rows start:stop: uint8 [stop - start, num_groups]."""
    num_groups, first = entry.shape[1], start // 8
    words = checkpoint.read_stored(entry, first * 4 * num_groups, -(-stop // 8) * 4 * num_groups)
    by_row = unpack(words.view(-1, num_groups, 4)).transpose(1, 2).reshape(-1, num_groups)
    return by_row[start - 8 * first : stop - 8 * first]


def _misfit(packed: TensorEntry, entry: TensorEntry, expected: str) -> WrongTensor:
    return WrongTensor(
        f"tensor {entry.name} in {entry.file} is {entry.dtype} {list(entry.shape)}; {packed.name} "
        f"{list(packed.shape)} needs {expected}"
    )


def _of_groups() -> str:
    return f"of groups of {', '.join(map(str, GROUP_SIZES))} inputs or multiples of these, or of whole rows"
