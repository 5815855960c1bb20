"""config.json of a converted model, which says in compressed-tensors' words how its weights are kept."""

from __future__ import annotations

from typing import Any

from penstock.weights.store import WeightStore
from penstock.weights.tensors import ModelTensors
from penstock.weights.weight_format import INT8, Int8

#: In the config.json of a converted model: the head is there for others, and is the embedding's matrix.
TIED_HEAD = "penstock_tied_head"


def converted_config(store: WeightStore) -> dict[str, Any]:
    config = store.checkpoint.config | {"quantization_config": quantization_config(store.tensors)}
    if store.tensors.is_tied:
        config |= {"tie_word_embeddings": False, TIED_HEAD: True}
    return config


def quantization_config(tensors: ModelTensors) -> dict[str, Any]:
    """What compressed-tensors calls our INT8; modules that stay float32 are named. Embeddings have scales per
    channel whatever the layers have."""
    floats = [
        part.removesuffix(".weight")
        for tensor in tensors.embedding
        if not tensor.is_matrix and len(tensor.shape) == 2
        for part in tensor.parts
    ]
    groups = {"Linear Embedding": INT8.scheme()}
    if tensors.group_size:
        embeddings = "Embedding lm_head" if tensors.is_tied else "Embedding"
        groups = {"Linear": Int8(tensors.group_size).scheme(), embeddings: INT8.scheme()}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {
                "targets": targets.split(),
                "weights": weights,
                "format": "int-quantized",  # without it compressed-tensors takes weight-only INT8 for packed
            }
            for index, (targets, weights) in enumerate(groups.items())
        },
        "ignore": floats,
    }
