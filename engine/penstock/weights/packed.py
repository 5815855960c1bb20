"""8-bit integers packed into int32 words, as compressed-tensors' `pack-quantized` has them: a word holds four
of a row's, the first in its lowest byte, each with 128 added. In a little-endian file that is a row of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import WrongTensor
from penstock.weights.checkpoint import Checkpoint, TensorEntry

#: What is flipped to subtract 128 from an unsigned byte and read the rest as a signed one.
SIGN_BIT = 0x80


def check_words(entry: TensorEntry) -> None:
    """Raises WrongTensor if these are no int32 words in rows."""
    if entry.dtype != "I32" or len(entry.shape) != 2:
        raise WrongTensor(
            f"tensor {entry.name} in {entry.file} has dtype {entry.dtype} and shape {list(entry.shape)}; "
            "packed integers are rows of I32"
        )


def unpacked_entries(checkpoint: Checkpoint) -> Iterator[TensorEntry]:
    """The checkpoint's tensors, with `weight` (INT8 [out_features, in_features]) in place of `weight_packed`.
    Raises WrongTensor."""
    for entry in checkpoint.entries.values():
        if entry.name.endswith(".weight_packed"):
            check_words(entry)
            name, shape = entry.name.removesuffix("_packed"), (entry.shape[0], 4 * entry.shape[1])
            decode = PackedRows(entry).read
            yield TensorEntry(name, entry.file, entry.offset, "I8", shape, entry.num_bytes, decode)
        else:
            yield entry


@dataclass(frozen=True)
class PackedRows:
    """A matrix that is packed along its rows."""

    stored: TensorEntry

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """int8 [stop - start, in_features]."""
        width = 4 * self.stored.shape[1]
        row_bytes = checkpoint.read_stored(self.stored, start * width, stop * width)
        return row_bytes.bitwise_xor_(SIGN_BIT).view(torch.int8).view(stop - start, width)
