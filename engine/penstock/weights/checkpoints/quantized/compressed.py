"""The tensors of a compressed-tensors checkpoint, each matrix by what its files have of it."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.quantized import compressed_schemes
from penstock.weights.checkpoints.quantized.fp8 import fp8_entries
from penstock.weights.checkpoints.quantized.mxfp4 import Mxfp4
from penstock.weights.checkpoints.quantized.packed import unpacked_entry
from penstock.weights.checkpoints.quantized.packed_int4 import CompressedInt4, int4_entry
from penstock.weights.checkpoints.tensor_entry import TensorEntry


def compressed_entries(checkpoint: Checkpoint) -> Iterator[TensorEntry]:
    """The checkpoint's tensors, with `weight` for each `weight_packed`, and floats for FP8. Raises
    MissingTensor and WrongTensor."""
    quantization = checkpoint.config["quantization_config"]
    kinds = compressed_schemes.kinds(quantization)
    has_zero_points = compressed_schemes.has_zero_points(quantization)
    for entry in fp8_entries(checkpoint):
        name = entry.name.removesuffix("_packed")
        if not entry.name.endswith(".weight_packed"):
            yield entry
        elif entry.dtype == "U8" and "mxfp4" in kinds:
            matrix = Mxfp4.of(entry, checkpoint.entry(f"{name}_scale"))
            yield from (entry, int4_entry(name, entry, matrix.shape, matrix))
        elif "int4" in kinds:
            packed = CompressedInt4.of(checkpoint, name, has_zero_points)
            shape = (entry.shape[0], 8 * entry.shape[1])
            yield from (entry, int4_entry(name, entry, shape, packed))
        else:
            yield unpacked_entry(entry)
