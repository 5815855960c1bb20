"""The tensors of a compressed-tensors checkpoint, each matrix by what its files have of it."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.quantized import compressed_schemes
from penstock.weights.checkpoints.quantized.fp8 import without_fp8
from penstock.weights.checkpoints.quantized.mxfp4 import Mxfp4
from penstock.weights.checkpoints.quantized.packed import unpacked_entry
from penstock.weights.checkpoints.quantized.packed_int4 import CompressedInt4, int4_entry
from penstock.weights.checkpoints.tensor_entry import TensorEntry

#: Endings of compressed-tensors' scales for activations, keys and values. The scales say how to round these.
#: Penstock does not use these scales, and nothing is lost.
ACTIVATION_SCALES = tuple(
    f".{of}_{kind}" for of in ("input", "output", "q", "k", "v") for kind in ("scale", "zero_point")
)


def compressed_entries(
    checkpoint: Checkpoint, quantization: compressed_schemes.Quantization, block: tuple[int, int]
) -> Iterator[TensorEntry]:
    """The checkpoint's tensors, with `weight` for each `weight_packed`, and floats for FP8. Raises
    MissingTensor and WrongTensor."""
    kinds = compressed_schemes.kinds(quantization)
    has_zero_points = compressed_schemes.has_zero_points(quantization)
    for entry in without_fp8(checkpoint, block):
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
