"""INT8 in two planes of four bits, as Penstock's own converted folders have it: the arrays NAME_upper and
NAME_lower, uint8 [out_features, in_features / 2]. Byte i has input 2 i in its low half. The integers are
16 * (upper - 8) + lower, and NAME_scale has their scales as it has those of INT8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from penstock.errors import WrongTensor
from penstock.kernels.planes_tensor import join
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.tensor_entry import TensorEntry

UPPER, LOWER = "_upper", "_lower"


def planes_entries(checkpoint: Checkpoint) -> Iterator[TensorEntry]:
    """The checkpoint's tensors, and an INT8 matrix for each two planes. Raises MissingTensor and
    WrongTensor."""
    for entry in checkpoint.entries.values():
        yield entry
        if entry.name.endswith(UPPER):
            name = entry.name.removesuffix(UPPER)
            yield _joined(name, entry, checkpoint.entry(name + LOWER))


def _joined(name: str, upper: TensorEntry, lower: TensorEntry) -> TensorEntry:
    for entry in (upper, lower):
        if entry.dtype != "U8" or len(entry.shape) != 2 or entry.shape != upper.shape:
            raise WrongTensor(
                f"tensor {entry.name} in {entry.file} is {entry.dtype} {list(entry.shape)}; {upper.name} and "
                f"{lower.name} have to be U8 of one shape with two axes. Convert the model again"
            )
    shape = upper.shape[0], 2 * upper.shape[1]
    num_bytes = upper.num_bytes + lower.num_bytes
    decode = JoinedRows(upper, lower).read
    return TensorEntry(name, upper.file, upper.offset, "I8", shape, num_bytes, decode, sources=(upper, lower))


@dataclass(frozen=True)
class JoinedRows:
    """A matrix as INT8."""

    upper: TensorEntry
    lower: TensorEntry

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """int8 [stop - start, in_features]."""
        width = self.upper.shape[1]
        planes = (
            checkpoint.read_stored(each, start * width, stop * width) for each in (self.upper, self.lower)
        )
        return join(*(plane.view(stop - start, width) for plane in planes))
