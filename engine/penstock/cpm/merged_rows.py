"""Tensors that are put together from others: rows one after another, or columns side by side. A merged tensor
is an entry that reads its rows from its parts when they are asked for; nothing is merged in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from penstock.errors import CorruptFile
from penstock.weights.checkpoints.tensor_entry import DTYPES, TensorEntry

if TYPE_CHECKING:
    from penstock.weights.checkpoints.checkpoint import Checkpoint


class Piece(NamedTuple):
    """Some rows of a tensor."""

    entry: TensorEntry
    first_row: int
    num_rows: int


@dataclass(frozen=True)
class RowPieces:
    """Rows of several tensors, one after another."""

    pieces: tuple[Piece, ...]

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """Rows start:stop. Raises CorruptFile."""
        found, row = [], 0
        for piece in self.pieces:
            first, last = max(start, row), min(stop, row + piece.num_rows)
            if first < last:
                offset = piece.first_row - row
                found.append(piece.entry.read_rows(checkpoint, first + offset, last + offset))
            row += piece.num_rows
        return found[0] if len(found) == 1 else torch.cat(found)


@dataclass(frozen=True)
class ColumnPieces:
    """Matrices of as many rows, side by side."""

    entries: tuple[TensorEntry, ...]

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """Rows start:stop. Raises CorruptFile."""
        return torch.cat([entry.read_rows(checkpoint, start, stop) for entry in self.entries], dim=1)


def merge_rows(name: str, pieces: Sequence[Piece]) -> TensorEntry:
    """A tensor of rows. Raises CorruptFile."""
    first = pieces[0].entry
    _check(name, [piece.entry for piece in pieces], 1)
    shape = (sum(piece.num_rows for piece in pieces), *first.shape[1:])
    return _merged(name, shape, RowPieces(tuple(pieces)), [piece.entry for piece in pieces])


def merge_columns(name: str, entries: Sequence[TensorEntry]) -> TensorEntry:
    """A matrix of columns. Raises CorruptFile."""
    _check(name, entries, 2)
    if any(entry.shape[0] != entries[0].shape[0] for entry in entries):
        raise CorruptFile(f"the parts of {name} have different numbers of rows; download the files again")
    shape = (entries[0].shape[0], sum(entry.shape[1] for entry in entries))
    return _merged(name, shape, ColumnPieces(tuple(entries)), entries)


def _check(name: str, entries: Sequence[TensorEntry], num_axes: int) -> None:
    first = entries[0]
    for entry in entries:
        is_plain = entry.dtype in DTYPES and entry.dtype == first.dtype and entry.shape
        if not is_plain or len(entry.shape) < num_axes or len(entry.shape) != len(first.shape):
            raise CorruptFile(
                f"{entry.name} in {entry.file} has dtype {entry.dtype} and shape {list(entry.shape)}, which "
                f"can't be a part of {name}; download the files again"
            )
        if num_axes == 1 and entry.shape[1:] != first.shape[1:]:
            raise CorruptFile(f"the parts of {name} have rows of different lengths; download the files again")


def _merged(
    name: str, shape: tuple[int, ...], rows: RowPieces | ColumnPieces, entries: Sequence[TensorEntry]
) -> TensorEntry:
    first, num_bytes = entries[0], math.prod(shape) * DTYPES[entries[0].dtype].itemsize
    sources = tuple(dict.fromkeys(entries))
    return TensorEntry(
        name, first.file, first.offset, first.dtype, shape, num_bytes, rows.read, True, sources
    )
