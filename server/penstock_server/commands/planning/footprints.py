"""A model that is not loaded, as a plan needs it: its footprint, by config.json or a GGUF file's header."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig
from penstock.model.footprint import footprint
from penstock.model.pooling.find_pooling import find_pooling, wish_of
from penstock.model.registry import open_model, read_pooled_spec, read_spec
from penstock.spec import ModelFootprint, ModelSpec
from penstock.weights.checkpoints.formats import read_config
from penstock.weights.store import WeightStore, planned_tensors
from penstock.weights.tensors import ModelTensors


def footprint_of(config_json: dict[str, Any], config: EngineConfig) -> ModelFootprint:
    """The facts about a model that a plan needs, from config.json. Raises UnsupportedModel, InvalidConfig."""
    spec, tensors = tensors_of(config_json, config)
    return footprint(spec, tensors, spec.kv_layout(config.kv_dtype))


def footprint_at(path: Path, config: EngineConfig) -> ModelFootprint:
    """The same for a model's folder, of which config.json is enough, or for a GGUF file, whose header says
    how each tensor is kept. Raises CheckpointError."""
    return described_at(path, config)[0]


def described_at(path: Path, config: EngineConfig) -> tuple[ModelFootprint, list[str]]:
    """The same, and lines about a GGUF file's weights: in how many bits they are kept, and with which
    loss."""
    if not path.is_file():
        told = read_config(path)
        if (pooling := find_pooling(path, told, wish_of(config))) is None:
            return footprint_of(told, config), []
        family, spec = read_pooled_spec(told, pooling)
        tensors = planned_tensors(family.model_tensors(spec), told, config.weights, config.group_size)
        return footprint(spec, tensors, spec.kv_layout(config.kv_dtype)), []
    opened = open_model(
        path, group_size=config.group_size, weights=config.weights, model_impl=config.model_impl
    )
    opened.store.close()
    size = footprint(opened.spec, opened.store.tensors, opened.spec.kv_layout(config.kv_dtype))
    return size, [_kept_line(opened.store)]


def _kept_line(store: WeightStore) -> str:
    facts, share = store.facts, store.lossless_share
    bits = 8 * facts.num_bytes / max(1, facts.num_parameters)
    loss = "kept without loss"
    if share < 1:
        loss = f"{math.floor(100 * share)}% kept without loss, the others rounded (see `penstock report`)"
    return f"weights: {facts.quantization} of the file, in memory {bits:.1f} bits each; {loss}"


def tensors_of(config_json: dict[str, Any], config: EngineConfig) -> tuple[ModelSpec, ModelTensors]:
    """A model's numbers, and its tensors as they would be computed with. Raises as footprint_of() does."""
    family, spec = read_spec(config_json, config.model_impl)
    return spec, planned_tensors(family.model_tensors(spec), config_json, config.weights, config.group_size)
