"""FP8 (E4M3): a byte for each weight, and scales for a tensor, a row, a group of a row's inputs, or a block
of rows and columns. The files of DeepSeek and transformers call a block's scale `weight_scale_inv`, though
weights are multiplied by the scale; others have `weight_scale`. A scale is a number, or in MXFP8 and some of
DeepSeek's files a byte with an exponent of two (E8M0)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.config import GROUP_SIZES
from penstock.errors import WrongTensor
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.quantized.mxfp4 import GROUP, Mxfp4
from penstock.weights.checkpoints.quantized.nibbles import SCALE_DTYPES
from penstock.weights.checkpoints.quantized.packed_int4 import int4_entry
from penstock.weights.checkpoints.quantized.quantization_config import fp8_block, is_fp8
from penstock.weights.checkpoints.tensor_entry import DTYPES, TensorEntry

#: What follows the name of a matrix in the names of its scales.
SCALE_NAMES = ("_scale_inv", "_scale")
#: Dtypes of scales that are exponents of two.
EXPONENTS = ("U8", "F8_E8M0")
#: The number of each exponent. 255 stands for NaN, and becomes infinite.
POWERS = torch.ldexp(torch.ones(256), torch.arange(256) - 127)
#: Rows and columns that share a scale where a config names no block, but the files have scales of blocks.
USUAL_BLOCK = (128, 128)


def fp8_entries(checkpoint: Checkpoint) -> Iterator[TensorEntry]:
    """The checkpoint's tensors, with float32 in place of each FP8 matrix and its scales. Raises
    WrongTensor."""
    block = fp8_block(checkpoint.config)
    matrices = {entry.name for entry in checkpoint.entries.values() if is_fp8(entry)}
    belongings = {each for name in matrices for each in (*scale_names(name), f"{name}_zero_point")}
    codes = {
        entry.name: scale for entry in checkpoint.entries.values() if (scale := _fp4_scale(checkpoint, entry))
    }
    belongings |= {scale.name for scale in codes.values()}
    for entry in checkpoint.entries.values():
        if entry.name in matrices:
            yield fp8_entry(checkpoint, entry, block)
        elif entry.name in codes:
            mxfp4 = Mxfp4.of(replace(entry, dtype="U8"), replace(codes[entry.name], dtype="U8"))
            yield int4_entry(entry.name, entry, mxfp4.shape, mxfp4)
        elif entry.name not in belongings and not entry.name.endswith(".input_scale_ub"):
            yield entry


def _fp4_scale(checkpoint: Checkpoint, stored: TensorEntry) -> TensorEntry | None:
    """The scales of a matrix in FP4 among others in FP8, as DeepSeek V4 has its experts: those of MXFP4."""
    found = checkpoint.entries.get(f"{stored.name.removesuffix('weight')}scale")
    if (
        found is None
        or stored.dtype not in ("I8", "U8")
        or len(stored.shape) != 2
        or found.dtype not in EXPONENTS
    ):
        return None
    rows, width = stored.shape
    return found if found.shape == (rows, 2 * width // GROUP) and 2 * width % GROUP == 0 else None


def scale_names(name: str) -> list[str]:
    """The names that a matrix's scales may have."""
    return [*(name + ending for ending in SCALE_NAMES), f"{name.removesuffix('weight')}scale"]


def fp8_entry(checkpoint: Checkpoint, stored: TensorEntry, block: tuple[int, int]) -> TensorEntry:
    """An FP8 matrix as float32. Raises WrongTensor."""
    rows = Fp8Rows.with_scale(stored, fp8_scale(checkpoint, stored), block)
    return rows.entry(stored.name, stored.shape[0])


def fp8_scale(checkpoint: Checkpoint, stored: TensorEntry) -> TensorEntry:
    """The scales of a tensor in FP8. Raises MissingTensor."""
    found = [checkpoint.entries.get(name) for name in scale_names(stored.name)]
    return next((one for one in found if one is not None), None) or checkpoint.entry(f"{stored.name}_scale")


def fp8_group_size(num_inputs: int) -> int:
    """Inputs that share a scale where FP8 becomes INT8: the largest group that divides them; 0: none does."""
    return next((size for size in reversed(GROUP_SIZES) if num_inputs % size == 0), 0)


@dataclass(frozen=True)
class TurnedFp8:
    """weight[o, i] = stored[i, first + o] * scale[first + o]."""

    stored: TensorEntry
    scale: TensorEntry
    first: int

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """float32 [stop - start, in_features]."""
        start, stop, dtype = self.first + start, self.first + stop, DTYPES[self.scale.dtype]
        values = checkpoint.read_columns(self.stored, start, stop).view(torch.float8_e4m3fn).float()
        found = checkpoint.read_stored(self.scale, start * dtype.itemsize, stop * dtype.itemsize)
        return values.t() * found.view(dtype).float()[:, None]


def scale_numbers(stored: Tensor, dtype: str) -> Tensor:
    """Bytes of scales as float32."""
    if dtype in EXPONENTS:
        return POWERS[stored.int()]
    return stored.view(DTYPES[dtype]).float()


@dataclass(frozen=True)
class Fp8Rows:
    """weight[o, i] = stored[o, i] * scale[o // rows, i // columns]."""

    stored: TensorEntry
    scale: TensorEntry
    #: Rows and columns that share a scale.
    rows: int
    columns: int

    #: The row of the stored matrix at which this one begins.
    first_row: int = 0

    @classmethod
    def with_scale(cls, stored: TensorEntry, scale: TensorEntry, block: tuple[int, int]) -> Fp8Rows:
        """Raises WrongTensor."""
        flat = scale.shape[::2] if len(scale.shape) == 4 and scale.shape[1::2] == (1, 1) else scale.shape
        shapes = _blocks_by_shape(stored.shape, block) if len(stored.shape) == 2 else {}
        if flat not in shapes or scale.dtype not in (*SCALE_DTYPES, *EXPONENTS):
            raise WrongTensor(
                f"tensor {scale.name} in {scale.file} is {scale.dtype} {list(scale.shape)}; FP8 weights "
                f"{list(stored.shape)} need a scale for the tensor, for each row, for groups of a row, or "
                f"for each of the blocks that config.json names ({list(block)})"
            )
        return cls(stored, scale, *shapes[flat])

    @property
    def _is_in_groups(self) -> bool:
        return self.rows == 1 and self.columns in GROUP_SIZES

    def entry(self, name: str, num_rows: int) -> TensorEntry:
        """So many rows as a tensor."""
        stored, width = self.stored, self.stored.shape[1]
        return TensorEntry(
            name,
            stored.file,
            stored.offset + self.first_row * width,
            "F32",
            (num_rows, width),
            num_rows * width,
            self.read,
            group_size=self.columns if self._is_in_groups else fp8_group_size(width),
        )

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """float32 [stop - start, in_features]."""
        start, stop = self.first_row + start, self.first_row + stop
        width = self.stored.shape[1]
        stored = checkpoint.read_stored(self.stored, start * width, stop * width)
        values = stored.view(torch.float8_e4m3fn).view(-1, width).float()
        first = start // self.rows
        row_bytes = -(-width // self.columns) * (self.scale.num_bytes // math.prod(self.scale.shape))
        last = -(-stop // self.rows)
        stored = checkpoint.read_stored(self.scale, first * row_bytes, last * row_bytes)
        found = scale_numbers(stored, self.scale.dtype)
        by_row = found.view(last - first, -1).repeat_interleave(self.rows, 0)
        scales = by_row[start - first * self.rows :][: stop - start]
        return values.mul_(scales.repeat_interleave(self.columns, 1)[:, :width])


def _blocks_by_shape(
    stored: tuple[int, ...], block: tuple[int, int]
) -> dict[tuple[int, ...], tuple[int, int]]:
    """Rows and columns that share a scale, by the shape of the scales."""
    num_rows, width = stored
    if not num_rows or not width:
        return {}
    shapes: dict[tuple[int, ...], tuple[int, int]] = {}
    shapes |= {(num_rows, width // size): (1, size) for size in GROUP_SIZES if width % size == 0}
    for rows, columns in (USUAL_BLOCK, block):
        if min(rows, columns) > 0:
            shapes[-(-num_rows // rows), -(-width // columns)] = (min(rows, num_rows), min(columns, width))
    shapes |= {shape: (1, width) for shape in ((num_rows,), (num_rows, 1))}
    return shapes | {shape: (num_rows, width) for shape in ((), (1,), (1, 1))}
