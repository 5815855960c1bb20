"""Tensors of a GGUF file as the model's own code has them: decoded, with their rows in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from penstock.errors import CorruptFile
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.gguf_files.block_types import BY_NAME, GROUP, BlockType
from penstock.weights.checkpoints.int4_form import Int4Form
from penstock.weights.checkpoints.quantized.packed_int4 import int4_entry
from penstock.weights.checkpoints.tensor_entry import ARRAY_DTYPES, DTYPES, TensorEntry

#: Arrays of a matrix, each [num_rows, elements of a row].
Arrays = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Matrix:
    """Where the rows of an original tensor lie."""

    #: Tensors of the file, whose rows follow each other.
    parts: tuple[TensorEntry, ...]
    #: int64 [num_rows]: which row of the parts each row of the original is. None: they are in order.
    rows: Tensor | None = None
    #: int64 [num_units]: which unit of the file's columns each unit of the original's is, where a row has
    #: units of equal width in another order.
    columns: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        count = sum(part.shape[0] for part in self.parts) if self.rows is None else len(self.rows)
        return count, *self.parts[0].shape[1:]

    @property
    def num_bytes(self) -> int:
        """Of the rows in the file."""
        return sum(part.num_bytes // max(part.shape[0], 1) for part in self.parts[:1]) * self.shape[0]

    @property
    def unit_width(self) -> int:
        """Columns that stay side by side."""
        return self.shape[-1] // (1 if self.columns is None else len(self.columns))

    def read(self, stored: Callable[[TensorEntry, int, int], Arrays], start: int, stop: int) -> Arrays:
        """Rows start:stop of the original. `stored` reads rows of a part, some arrays at once."""
        if self.rows is None and len(self.parts) == 1:
            return stored(self.parts[0], start, stop)
        wanted = torch.arange(start, stop) if self.rows is None else self.rows[start:stop]
        needed = wanted if self.rows is None else torch.unique(wanted)
        found = [stored(*run) for run in self._runs(needed)] or [stored(self.parts[0], 0, 0)]
        arrays = {name: torch.cat([each[name] for each in found]) for name in found[0]}
        if self.rows is None:
            return arrays
        places = torch.searchsorted(needed, wanted)
        return {name: rows[places] for name, rows in arrays.items()}

    def in_columns(self, array: Tensor) -> Tensor:
        """Elements that units have each as many of, in the original's order."""
        if self.columns is None:
            return array
        units = array.view(*array.shape[:-1], len(self.columns), -1)
        found: Tensor = units[..., self.columns, :].flatten(-2)
        return found

    def _runs(self, needed: Tensor) -> Iterator[tuple[TensorEntry, int, int]]:
        """Rows that follow each other: the part, the first row there, the end. `needed` is sorted."""
        begin = 0
        for part in self.parts:
            inside = needed[(needed >= begin) & (needed < begin + part.shape[0])] - begin
            if len(inside):
                cuts = (torch.nonzero(inside.diff() != 1)[:, 0] + 1).tolist()
                for first, end in pairwise((0, *cuts, len(inside))):
                    yield part, int(inside[first]), int(inside[end - 1]) + 1
            begin += part.shape[0]


@dataclass(frozen=True, eq=False)
class GgufRows:
    """A tensor of floats, or of blocks that are read as floats."""

    matrix: Matrix
    #: What undoes the converter's arithmetic with each element.
    change: Callable[[Tensor], Tensor] | None = None

    @property
    def dtype(self) -> str:
        """The dtype of what read() returns, as safetensors names it."""
        dtypes = {part.dtype for part in self.matrix.parts}
        is_plain = self.change is None and len(dtypes) == 1 and dtypes <= set(DTYPES)
        return dtypes.pop() if is_plain else "F32"

    @property
    def is_plain(self) -> bool:
        """Whether the bytes of the file are the tensor."""
        matrix = self.matrix
        is_in_order = matrix.rows is None and matrix.columns is None and len(matrix.parts) == 1
        return is_in_order and self.change is None and matrix.parts[0].dtype in DTYPES

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """Rows start:stop."""
        rows = self.matrix.read(lambda *run: {"": self._rows(checkpoint, *run)}, start, stop)[""]
        rows = self.matrix.in_columns(rows)
        return rows if self.change is None else self.change(rows.float())

    def _rows(self, checkpoint: Checkpoint, part: TensorEntry, start: int, stop: int) -> Tensor:
        shape = (stop - start, *part.shape[1:])
        if kind := BY_NAME.get(part.dtype):
            return kind.decode(_blocks(checkpoint, part, kind, start, stop)).view(shape)
        row_bytes = part.num_bytes // part.shape[0]
        stored = checkpoint.read_stored(part, start * row_bytes, stop * row_bytes)
        rows = stored.view(ARRAY_DTYPES[part.dtype]).view(shape)
        return rows if part.dtype == self.dtype else rows.float()


@dataclass(frozen=True, eq=False)
class GgufCodes:
    """A matrix of blocks of 4-bit codes."""

    matrix: Matrix
    kind: BlockType
    form: Int4Form

    @classmethod
    def of(cls, matrix: Matrix, kind: BlockType) -> GgufCodes:
        """Where blocks reach over units of columns, the columns stay in the file's order."""
        assert kind.form is not None
        is_permuted = matrix.columns is not None and matrix.unit_width % kind.num_inputs != 0
        return cls(matrix, kind, replace(kind.form, is_permuted=is_permuted))

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> Arrays:
        arrays = self.matrix.read(lambda *run: self._rows(checkpoint, *run), start, stop)
        if not self.form.is_permuted:
            return {name: self.matrix.in_columns(array) for name, array in arrays.items()}
        assert self.matrix.columns is not None
        inputs = torch.arange(self.matrix.shape[1]).view(len(self.matrix.columns), -1)
        return arrays | {"order": inputs[self.matrix.columns.argsort()].flatten().int()}

    def _rows(self, checkpoint: Checkpoint, part: TensorEntry, start: int, stop: int) -> Arrays:
        assert self.kind.arrays is not None
        arrays = self.kind.arrays(_blocks(checkpoint, part, self.kind, start, stop))
        _check_finite(part, arrays["scale"], arrays.get("minimum"))
        return {name: array.reshape(stop - start, -1) for name, array in arrays.items()}


@dataclass(frozen=True, eq=False)
class GgufIntegers:
    """A matrix of blocks that are integers of at most 8 bits, with a scale for each group."""

    matrix: Matrix
    kind: BlockType

    @property
    def group_size(self) -> int:
        return self.kind.group_size

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> tuple[Tensor, Tensor]:
        arrays = self.matrix.read(lambda *run: self._rows(checkpoint, *run), start, stop)
        return self.matrix.in_columns(arrays["integers"]), self.matrix.in_columns(arrays["scales"])

    def _rows(self, checkpoint: Checkpoint, part: TensorEntry, start: int, stop: int) -> Arrays:
        assert self.kind.integers is not None
        integers, scales = self.kind.integers(_blocks(checkpoint, part, self.kind, start, stop))
        _check_finite(part, scales)
        return {"integers": integers.reshape(stop - start, -1), "scales": scales.reshape(stop - start, -1)}


def _check_finite(stored: TensorEntry, *scales: Tensor | None) -> None:
    """Raises CorruptFile."""
    if not all(bool(torch.isfinite(each).all()) for each in scales if each is not None):
        raise CorruptFile(
            f"{stored.file}: tensor {stored.name} ({stored.dtype}) has a scale that is NaN or infinite; "
            "download the file again"
        )


def _blocks(checkpoint: Checkpoint, stored: TensorEntry, kind: BlockType, start: int, stop: int) -> Tensor:
    """The blocks of rows start:stop: uint8 [num_blocks, bytes of a block]."""
    row_bytes = stored.num_bytes // stored.shape[0]
    return checkpoint.read_stored(stored, start * row_bytes, stop * row_bytes).view(-1, kind.num_bytes)


def made_of(name: str, matrix: Matrix, change: Callable[[Tensor], Tensor] | None = None) -> TensorEntry:
    """The entry of a tensor under the name that the model's own code has for it."""
    first, shape = matrix.parts[0], matrix.shape
    names = {part.dtype for part in matrix.parts}
    kind = BY_NAME.get(first.dtype) if len(names) == 1 and change is None else None
    if kind is not None and len(shape) != 2:
        return replace(first, name=name)  # no matrix: the store refuses the entry
    sources = matrix.parts if len(matrix.parts) > 1 else ()
    if kind is not None and kind.form is not None:
        codes = int4_entry(name, first, (shape[0], shape[1]), GgufCodes.of(matrix, kind))
        return replace(codes, num_bytes=matrix.num_bytes, sources=sources)
    keeps_integers = kind is not None and kind.integers is not None
    if kind is not None and matrix.columns is not None and matrix.unit_width % kind.group_size:
        keeps_integers = False
    rows = GgufRows(matrix, change)
    is_quantized = bool(names & set(BY_NAME))
    return TensorEntry(
        name,
        first.file,
        first.offset,
        rows.dtype,
        shape,
        matrix.num_bytes,
        None if rows.is_plain else rows.read,
        sources=sources,
        int8=GgufIntegers(matrix, kind) if kind is not None and keeps_integers else None,
        group_size=kind.group_size if kind is not None else GROUP if is_quantized else 0,
    )


def renamed(name: str, stored: TensorEntry) -> TensorEntry:
    """A tensor as the file has it, under another name."""
    return made_of(name, Matrix((stored,)))


def read_vector(entry: TensorEntry, size: int) -> list[float]:
    """The elements of a tensor of shape [size]. Raises CorruptFile for another shape."""
    if entry.shape != (size,):
        raise CorruptFile(
            f"{entry.file}: tensor {entry.name} has shape {list(entry.shape)} instead of [{size}]; download "
            "the file again"
        )
    with Checkpoint(entry.file, {}, {entry.name: entry}) as checkpoint:
        return [float(value) for value in checkpoint.read(entry.name)]
