"""TensorEntry: where one tensor of a checkpoint lies, and of which dtype its elements are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.weights.checkpoints.int4_form import Int4Source
from penstock.weights.checkpoints.int8_source import Int8Source

if TYPE_CHECKING:
    from penstock.weights.checkpoints.checkpoint import Checkpoint

#: Dtypes that are read, by their names in safetensors.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
}
#: Dtypes of arrays that only a format of weights can read.
ARRAY_DTYPES = DTYPES | {"I32": torch.int32, "U8": torch.uint8}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies."""

    name: str
    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    #: Makes rows start:stop of the bytes in the file, where these are not elements of `dtype` in the order of
    #: the tensor's rows.
    decode: Callable[[Checkpoint, int, int], Tensor] | None = None
    #: Whether a matrix is [out_features, in_features], though the family's checkpoints usually have
    #: [in_features, out_features].
    has_outputs_first: bool = False
    #: The tensors that `decode` reads, where they are not at `offset` of `file` alone.
    sources: tuple[TensorEntry, ...] = ()
    #: The matrix as 4-bit codes, where it is kept so; `decode` makes floats of it.
    int4: Int4Source | None = None
    #: The matrix as INT8 in groups, where `decode` makes floats of such a matrix.
    int8: Int8Source | None = None
    #: Inputs that should share a scale if the matrix becomes INT8: as many as share one in the file. 0: no
    #: such wish.
    group_size: int = 0

    def read_rows(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """Rows start:stop of a tensor of at least one axis, whose dtype is one of DTYPES. `checkpoint` has
        the file open; the tensor need not be one of its own. Raises CorruptFile."""
        if self.decode is not None:
            return self.decode(checkpoint, start, stop)
        row_bytes = self.num_bytes // self.shape[0]
        stored = checkpoint.read_stored(self, start * row_bytes, stop * row_bytes)
        return stored.view(DTYPES[self.dtype]).view(stop - start, *self.shape[1:])
