"""Int8Source: a matrix of a checkpoint that is INT8 in groups of inputs already, though its file has other
bytes than our arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from penstock.weights.checkpoints.checkpoint import Checkpoint


class Int8Source(Protocol):
    """A matrix that can be had as integers and scales, without loss."""

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Rows start:stop: integers (int8 [rows, in_features]) and floating scales [rows, num_groups]. Raises
        CorruptFile."""
