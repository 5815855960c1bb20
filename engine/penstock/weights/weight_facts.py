"""WeightFacts: a model's weights in the words by which people tell models apart: llama, 8.0B, Q4_K_M."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from penstock.gguf_file import is_gguf
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.formats.stacked_format import in_one_format
from penstock.weights.formats.weight_format import WeightFormat
from penstock.weights.tensors import ModelTensors, UnitLayout


@dataclass(frozen=True)
class WeightFacts:
    #: "gguf" or "safetensors".
    file_format: str
    #: `model_type` of config.json; "" if it has none.
    family: str
    #: The types of a GGUF file ("Q4_K_M"), or how most weights are kept: "INT8", "INT4", "MXFP4".
    quantization: str
    #: Elements of all tensors. A matrix that serves as embedding and as head counts once.
    num_parameters: int
    #: Bytes of all tensors in memory.
    num_bytes: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, tensors: ModelTensors) -> WeightFacts:
        units = [
            unit for unit in tensors.units if unit.key.plane != "lower"
        ]  # its elements are the upper one's
        whole = tensors.embedding, *(unit.tensors for unit in units), tensors.head
        return cls(
            "gguf" if is_gguf(checkpoint.folder) else "safetensors",
            str(checkpoint.config.get("model_type") or "").removesuffix("_text"),
            checkpoint.file_type or _usual_kind(tensors),
            sum(tensor.num_elements for group in whole for tensor in group),
            sum(unit.num_bytes for unit in tensors.units)
            + sum(UnitLayout.of(ends).num_bytes for ends in (tensors.embedding, tensors.head)),
        )


def _usual_kind(tensors: ModelTensors) -> str:
    kinds: Counter[str] = Counter()
    for matrix in tensors.multiplied:
        for part in in_one_format(matrix):
            kinds[_kind(part.format)] += part.num_elements
    return kinds.most_common(1)[0][0]


def _kind(form: WeightFormat) -> str:
    """ "int4 mxfp4, groups of 32" -> "MXFP4", "int4 with zero points, groups of 64" -> "INT4"."""
    words = form.name.partition(",")[0].split()
    has_codebook = words[0] == "int4" and words[1:] and words[1] != "with"
    return words[1 if has_codebook else 0].upper()
