"""The tensors of a compressed-tensors checkpoint, each matrix by what its files have of it."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.quantized import compressed_schemes
from penstock.weights.checkpoints.quantized.fp8 import fp8_entries
from penstock.weights.checkpoints.quantized.packed import unpacked_entry
from penstock.weights.checkpoints.quantized.packed_int4 import CompressedInt4, int4_entry
from penstock.weights.checkpoints.tensor_entry import TensorEntry


def compressed_entries(checkpoint: Checkpoint) -> Iterator[TensorEntry]:
    """The checkpoint's tensors, with `weight` for each `weight_packed`, and floats for FP8. Raises
    MissingTensor and WrongTensor."""
    quantization = checkpoint.config["quantization_config"]
    has_zero_points = compressed_schemes.has_zero_points(quantization)
    has_int4 = "int4" in compressed_schemes.kinds(quantization)
    packed = [name for name in checkpoint.entries if name.endswith(".weight_packed")]
    of_floats = {name for name in packed if checkpoint.entries[name].dtype == "U8"}
    belongings = {
        name.removesuffix("_packed") + ending
        for name in of_floats
        for ending in ("_scale", compressed_schemes.GLOBAL_SCALE)
    }
    for entry in fp8_entries(checkpoint):
        name = entry.name.removesuffix("_packed")
        if entry.name in of_floats:
            yield _floats_of_few_bits(checkpoint, name, entry)
        elif entry.name in belongings:
            continue
        elif not entry.name.endswith(".weight_packed"):
            yield entry
        elif has_int4:
            packed_words = CompressedInt4.of(checkpoint, name, has_zero_points)
            shape = (entry.shape[0], 8 * entry.shape[1])
            yield from (entry, int4_entry(name, entry, shape, packed_words))
        else:
            yield unpacked_entry(entry)


def _floats_of_few_bits(checkpoint: Checkpoint, name: str, stored: TensorEntry) -> TensorEntry:
    """MXFP4, MXFP6 or NVFP4, by the dtypes and shapes: a checkpoint may mix them."""
    from penstock.weights.checkpoints.quantized.mxfp4 import Mxfp4
    from penstock.weights.checkpoints.quantized.mxfp6 import Mxfp6, is_mxfp6
    from penstock.weights.checkpoints.quantized.nvfp4 import Nvfp4

    scale = checkpoint.entry(f"{name}_scale")
    if scale.dtype == "F8_E4M3":
        return Nvfp4.of(stored, scale, checkpoint.entry(name + compressed_schemes.GLOBAL_SCALE)).entry(name)
    if is_mxfp6(stored, scale):
        return Mxfp6.of(stored, scale).entry(name)
    matrix = Mxfp4.of(stored, scale)
    return int4_entry(name, stored, matrix.shape, matrix)
