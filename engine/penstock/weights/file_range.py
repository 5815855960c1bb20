"""FileRange: where tensors lie in a file byte for byte as in their buffer, so that one read brings them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from penstock.memory.pages import PAGE
from penstock.weights.tensor_source import TensorSource
from penstock.weights.tensors import TensorSpec, UnitLayout, stored_arrays


class FileRange(NamedTuple):
    """Bytes of a file. Arrays that are made of others (UnitLayout.derive) are not among them."""

    file: Path
    offset: int
    num_bytes: int

    @classmethod
    def of(cls, source: TensorSource, tensors: tuple[TensorSpec, ...]) -> FileRange | None:
        """Where embedding, unit or head lie, beginning on a page. None if the checkpoint is not laid out
        so."""
        end, first = 0, None
        for array in stored_arrays(tensors):
            entry = source.find(array.name)
            if entry is None or entry.dtype != array.component.dtype or entry.decode is not None:
                return None
            if first is None:
                first, end = entry, entry.offset
            if (entry.file, entry.offset) != (first.file, end):
                return None
            end += entry.num_bytes
        num_bytes = UnitLayout.of(tensors).num_stored_bytes
        if first is None or first.offset % PAGE or end - first.offset != num_bytes:
            return None
        return cls(first.file, first.offset, num_bytes)
