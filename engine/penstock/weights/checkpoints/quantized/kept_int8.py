"""Matrices of other files that are INT8 in groups without loss: their entries in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.errors import CorruptFile
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.int8_source import Int8Source
from penstock.weights.checkpoints.tensor_entry import TensorEntry


def int8_entry(name: str, stored: TensorEntry, shape: tuple[int, int], source: Int8Source) -> TensorEntry:
    """The entry of a matrix [out_features, in_features]. `stored` is the array with the codes."""
    return TensorEntry(
        name,
        stored.file,
        stored.offset,
        "F32",
        shape,
        stored.num_bytes,
        ExactRows(name, source).read,
        has_outputs_first=True,
        int8=source,
        group_size=source.group_size,
    )


@dataclass(frozen=True)
class ExactRows:
    """A matrix of integers and scales as float32."""

    name: str
    source: Int8Source

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """float32 [stop - start, in_features]."""
        integers, scales = self.source.read(checkpoint, start, stop)
        groups = integers.view(*scales.shape, -1).float()
        return groups.mul_(scales.float()[..., None]).flatten(1)


def corrupt_scales(codes: TensorEntry, scale: TensorEntry) -> CorruptFile:
    return CorruptFile(
        f"{scale.file}: {scale.name} has a scale of {codes.name} that is NaN or infinite; download the file "
        "again"
    )
