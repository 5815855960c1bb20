"""The tensors of a checkpoint that NVIDIA's ModelOpt quantized, each matrix by the dtypes and shapes of what
its files have of it: a checkpoint may mix its forms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.errors import WrongTensor
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.quantized.fp8 import fp8_entries
from penstock.weights.checkpoints.quantized.mxfp4 import Mxfp4
from penstock.weights.checkpoints.quantized.nvfp4 import MULTIPLIES, Nvfp4
from penstock.weights.checkpoints.quantized.packed_int4 import int4_entry
from penstock.weights.checkpoints.quantized.quantization_config import PRE_SCALE
from penstock.weights.checkpoints.tensor_entry import DTYPES, TensorEntry


def modelopt_entries(checkpoint: Checkpoint) -> Iterator[TensorEntry]:
    """The checkpoint's tensors, with a matrix in place of each matrix's codes and scales. Raises
    MissingTensor and WrongTensor."""
    of_four_bits = {
        entry.name
        for entry in checkpoint.entries.values()
        if entry.dtype == "U8" and entry.name.endswith(".weight")
    }
    belongings = {name + ending for name in of_four_bits for ending in ("_scale", MULTIPLIES)}
    belongings |= {name.removesuffix(".weight") + PRE_SCALE for name in of_four_bits}
    for entry in fp8_entries(checkpoint):
        if entry.name in of_four_bits:
            yield _four_bits(checkpoint, entry)
        elif entry.name not in belongings:
            yield entry


def _four_bits(checkpoint: Checkpoint, stored: TensorEntry) -> TensorEntry:
    scale, name = checkpoint.entry(f"{stored.name}_scale"), stored.name
    if scale.dtype == "U8":
        mxfp4 = Mxfp4.of(stored, scale)
        matrix = int4_entry(name, stored, mxfp4.shape, mxfp4)
    else:
        matrix = Nvfp4.of(stored, scale, checkpoint.entry(name + MULTIPLIES)).entry(name)
    factors = checkpoint.entries.get(name.removesuffix(".weight") + PRE_SCALE)
    return matrix if factors is None else ScaledInputs.of(matrix, factors).entry()


@dataclass(frozen=True)
class ScaledInputs:
    """A matrix whose inputs are multiplied by numbers of their own: its columns are, here."""

    matrix: TensorEntry
    factors: TensorEntry

    @classmethod
    def of(cls, matrix: TensorEntry, factors: TensorEntry) -> ScaledInputs:
        """Raises WrongTensor."""
        if factors.shape != matrix.shape[1:] or factors.dtype not in DTYPES:
            raise WrongTensor(
                f"tensor {factors.name} in {factors.file} is {factors.dtype} {list(factors.shape)}; "
                f"{matrix.name} {list(matrix.shape)} needs a number for each input"
            )
        return cls(matrix, factors)

    def entry(self) -> TensorEntry:
        """The matrix as floats, which become INT8 in groups of the same size."""
        size = self.matrix.int4.form.group_size if self.matrix.int4 else self.matrix.group_size
        return replace(self.matrix, decode=self.read, int8=None, int4=None, group_size=size)

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """float32 [stop - start, in_features]."""
        rows = self.matrix.read_rows(checkpoint, start, stop).float()
        stored = checkpoint.read_stored(self.factors, 0, self.factors.num_bytes)
        return torch.mul(rows, stored.view(DTYPES[self.factors.dtype]).float())
