"""Tensors of a GGUF file as the model's own code has them: decoded, with their rows in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.errors import CorruptFile
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.gguf_files.block_types import BY_NAME, BlockType
from penstock.weights.checkpoints.int4_form import Int4Form
from penstock.weights.checkpoints.quantized.packed_int4 import int4_entry
from penstock.weights.checkpoints.tensor_entry import DTYPES, TensorEntry


@dataclass(frozen=True)
class RowOrder:
    """The order of a tensor's rows. llama.cpp rotates neighbours, so it has exchanged rows of q and k: row
    2 i + j of a head in the file is row i + j * head_dim / 2 of the original."""

    #: Rows of each head where rows were exchanged; 0: none were.
    head_dim: int = 0

    def read(
        self, stored: Callable[[int, int], dict[str, Tensor]], start: int, stop: int
    ) -> dict[str, Tensor]:
        """Rows start:stop of the original. `stored` reads rows of the file's order, some arrays at once."""
        if not self.head_dim:
            return stored(start, stop)
        first = start // self.head_dim * self.head_dim
        arrays = stored(first, -(-stop // self.head_dim) * self.head_dim)
        return {name: self._original(rows)[start - first : stop - first] for name, rows in arrays.items()}

    def _original(self, rows: Tensor) -> Tensor:
        heads = rows.reshape(-1, self.head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2)
        return heads.reshape(rows.shape)


@dataclass(frozen=True)
class GgufRows:
    """A tensor of floats, or of blocks that are read as floats."""

    stored: TensorEntry
    order: RowOrder = RowOrder()
    #: The number that the file has added to each element.
    offset: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether the bytes of the file are the tensor."""
        return self.stored.dtype in DTYPES and not self.order.head_dim and not self.offset

    @property
    def dtype(self) -> str:
        """The dtype of what read() returns, as safetensors names it."""
        return "F32" if self.stored.dtype in BY_NAME or self.offset else self.stored.dtype

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """Rows start:stop."""
        return self.order.read(lambda *rows: {"": self._rows(checkpoint, *rows)}, start, stop)[""]

    def _rows(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        shape = (stop - start, *self.stored.shape[1:])
        if kind := BY_NAME.get(self.stored.dtype):
            rows = kind.decode(_blocks(checkpoint, self.stored, kind, start, stop)).view(shape)
        else:
            row_bytes = self.stored.num_bytes // self.stored.shape[0]
            stored = checkpoint.read_stored(self.stored, start * row_bytes, stop * row_bytes)
            rows = stored.view(DTYPES[self.stored.dtype]).view(shape)
        return rows.float() - self.offset if self.offset else rows


@dataclass(frozen=True)
class GgufCodes:
    """A matrix of blocks of 4-bit codes."""

    stored: TensorEntry
    kind: BlockType
    form: Int4Form
    order: RowOrder = RowOrder()

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> dict[str, Tensor]:
        return self.order.read(lambda *rows: self._rows(checkpoint, *rows), start, stop)

    def _rows(self, checkpoint: Checkpoint, start: int, stop: int) -> dict[str, Tensor]:
        assert self.kind.arrays is not None
        arrays = self.kind.arrays(_blocks(checkpoint, self.stored, self.kind, start, stop))
        _check_finite(self.stored, arrays["scale"], arrays.get("minimum"))
        return {name: array.reshape(stop - start, -1) for name, array in arrays.items()}


@dataclass(frozen=True)
class GgufIntegers:
    """A matrix of blocks that are integers of at most 8 bits, with a scale for each group."""

    stored: TensorEntry
    kind: BlockType
    order: RowOrder = RowOrder()

    @property
    def group_size(self) -> int:
        return self.kind.group_size

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> tuple[Tensor, Tensor]:
        arrays = self.order.read(lambda *rows: self._rows(checkpoint, *rows), start, stop)
        return arrays["integers"], arrays["scales"]

    def _rows(self, checkpoint: Checkpoint, start: int, stop: int) -> dict[str, Tensor]:
        assert self.kind.integers is not None
        integers, scales = self.kind.integers(_blocks(checkpoint, self.stored, self.kind, start, stop))
        _check_finite(self.stored, scales)
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


def renamed(name: str, rows: GgufRows) -> TensorEntry:
    """The entry of a tensor under the name that the model's own code has for it."""
    stored, kind = rows.stored, BY_NAME.get(rows.stored.dtype)
    if kind is not None and len(stored.shape) != 2:
        return replace(stored, name=name)  # no matrix: the store refuses the entry
    if kind is not None and kind.form is not None:
        codes = GgufCodes(stored, kind, kind.form, rows.order)
        return int4_entry(name, stored, (stored.shape[0], stored.shape[1]), codes)
    keeps_integers = kind is not None and kind.integers is not None and not rows.offset
    return TensorEntry(
        name,
        stored.file,
        stored.offset,
        rows.dtype,
        stored.shape,
        stored.num_bytes,
        None if rows.is_plain else rows.read,
        int8=GgufIntegers(stored, kind, rows.order) if kind is not None and keeps_integers else None,
        group_size=kind.group_size if kind is not None else 0,
    )


def read_vector(entry: TensorEntry, size: int) -> list[float]:
    """The elements of a tensor of shape [size]. Raises CorruptFile for another shape."""
    if entry.shape != (size,):
        raise CorruptFile(
            f"{entry.file}: tensor {entry.name} has shape {list(entry.shape)} instead of [{size}]; download "
            "the file again"
        )
    with Checkpoint(entry.file, {}, {entry.name: entry}) as checkpoint:
        return [float(value) for value in checkpoint.read(entry.name)]
