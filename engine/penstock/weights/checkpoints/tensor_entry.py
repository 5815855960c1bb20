"""TensorEntry: where one tensor of a checkpoint lies, and of which dtype its elements are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies."""

    name: str
    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    #: Makes rows start:stop of the bytes in the file, where these are not elements of `dtype`.
    decode: Callable[[Checkpoint, int, int], Tensor] | None = None
