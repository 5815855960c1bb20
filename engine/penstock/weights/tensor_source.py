"""TensorSource: a checkpoint's tensors by the names that checkpoints with a head give them. A source counts
the bytes that are read, and knows no formats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.tensor_entry import TensorEntry

if TYPE_CHECKING:
    from penstock.weights.tensors import TensorSpec


class TensorSource:
    """What formats fill buffers from."""

    def __init__(self, checkpoint: Checkpoint, optional_prefix: str = "") -> None:
        """`optional_prefix` begins the names that checkpoints without a head leave shorter."""
        self.checkpoint = checkpoint
        self._prefix = optional_prefix
        #: Bytes read from the checkpoint so far.
        self.bytes_read = 0

    def find(self, name: str) -> TensorEntry | None:
        """Where a tensor lies; None if it is not there."""
        entries = self.checkpoint.entries
        return entries.get(name.removeprefix(self._prefix)) or entries.get(name)

    def entry(self, name: str) -> TensorEntry:
        """Where a tensor lies. Raises MissingTensor."""
        return self.find(name) or self.checkpoint.entry(name)

    def read(self, name: str, start: int = 0, stop: int | None = None, out: Tensor | None = None) -> Tensor:
        """Rows start:stop (None: to the end) of a tensor, in the checkpoint's dtype. Raises CorruptFile."""
        entry = self.entry(name)
        end = stop if stop is not None else (entry.shape[0] if entry.shape else 1)
        rows = self.checkpoint.read_rows(entry.name, start, end, out)
        self.count(rows.nbytes)
        return rows

    def count(self, num_bytes: int) -> None:
        """Count bytes that were read from the checkpoint without read()."""
        self.bytes_read += num_bytes

    def rows(self, tensor: TensorSpec, part: str) -> Tensor:
        """A whole part of a matrix as [out_features, in_features], in the checkpoint's dtype."""
        rows = self.read(part)
        return rows.t() if is_transposed(tensor, self.entry(part)) else rows

    def row_chunks(self, tensor: TensorSpec, num_elements: int) -> Iterator[Tensor]:
        """A matrix of an unquantized checkpoint as [some, in_features], about `num_elements` at a time."""
        step = max(1, num_elements // tensor.shape[1])
        for part in tensor.parts:
            entry = self.entry(part)
            if is_transposed(tensor, entry):
                yield from torch.split(self.rows(tensor, part), step)
            else:
                num_rows = entry.shape[0]
                for start in range(0, num_rows, step):
                    yield self.read(part, start, min(start + step, num_rows))


def is_transposed(tensor: TensorSpec, entry: TensorEntry) -> bool:
    """Whether a part is read as [in_features, out_features]. Parts that lie in the checkpoint in the tensor's
    own format, and parts whose entries give outputs first, never are."""
    return tensor.is_transposed and not tensor.format.holds(entry) and not entry.has_outputs_first
