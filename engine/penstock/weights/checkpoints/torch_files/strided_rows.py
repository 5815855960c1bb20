"""StridedRows: rows of a tensor whose elements don't lie one after the other, such as a transposed matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.weights.checkpoints.tensor_entry import DTYPES, TensorEntry

if TYPE_CHECKING:
    from penstock.weights.checkpoints.checkpoint import Checkpoint


@dataclass(frozen=True)
class StridedRows:
    """A view as torch describes it. Strides count elements."""

    #: The elements from the view's first one to its last one.
    span: TensorEntry
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """Rows start:stop. Raises CorruptFile."""
        if self._is_transposed:
            return self._read_columns(checkpoint, start, stop)
        dtype, shape = DTYPES[self.span.dtype], (stop - start, *self.shape[1:])
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, self.stride, strict=True))
        first = start * self.stride[0]
        width = dtype.itemsize
        stored = checkpoint.read_stored(self.span, first * width, (first + extent) * width)
        return torch.as_strided(stored.view(dtype), shape, self.stride).contiguous()

    @property
    def _is_transposed(self) -> bool:
        """Whether the view is a whole matrix that lies in the file column by column."""
        return len(self.shape) == 2 and self.stride == (1, self.shape[0])

    def _read_columns(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """Rows of the view, which are columns of the stored matrix."""
        entry, dtype = self.span, DTYPES[self.span.dtype]
        shape = (self.shape[1], self.shape[0])
        stored = TensorEntry(entry.name, entry.file, entry.offset, entry.dtype, shape, entry.num_bytes)
        columns = checkpoint.read_columns(stored, start * dtype.itemsize, stop * dtype.itemsize)
        return columns.view(dtype).t().contiguous()
