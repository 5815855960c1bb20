"""A model that is not loaded, as a plan needs it: its footprint, by config.json or a GGUF file's header."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.config import EngineConfig
from penstock.errors import CheckpointNotFound
from penstock.model.footprint import footprint
from penstock.model.pooling.find_pooling import find_pooling, wish_of
from penstock.model.registry import open_model, read_pooled_spec, read_spec
from penstock.spec import ModelFootprint, ModelSpec
from penstock.weights.checkpoints.checkpoint import weight_files
from penstock.weights.checkpoints.formats import read_config
from penstock.weights.conversion.fitted_formats import BitBudget, described, fit, fit_store
from penstock.weights.store import planned_tensors
from penstock.weights.tensors import ModelTensors
from penstock_server.commands.planning.kept_weights import kept_line, planned_line


def footprint_of(config_json: dict[str, Any], config: EngineConfig) -> ModelFootprint:
    """The facts about a model that a plan needs, from config.json. Raises UnsupportedModel, InvalidConfig."""
    spec, tensors = tensors_of(config_json, config)
    return footprint(spec, tensors, spec.kv_layout(config.kv_dtype))


def footprint_at(path: Path, config: EngineConfig) -> ModelFootprint:
    """The same for a model's folder, of which config.json is enough, or for a GGUF file, whose header says
    how each tensor is kept. Raises CheckpointError."""
    return described_at(path, config)[0]


def described_shape(
    config_json: dict[str, Any], config: EngineConfig, budget: BitBudget | None
) -> tuple[ModelFootprint, list[str]]:
    """footprint_of(), where there is a budget in the formats that fit there, with lines that name them."""
    if budget is None:
        return footprint_of(config_json, config), []
    spec, tensors = tensors_of(config_json, config)
    tensors = fit(tensors, budget)
    return footprint(spec, tensors, spec.kv_layout(config.kv_dtype)), described(tensors)


def described_at(
    path: Path, config: EngineConfig, budget: BitBudget | None = None
) -> tuple[ModelFootprint, list[str]]:
    """The same, and a line about the model's weights (kept_weights.py)."""
    if not path.is_file():
        told = read_config(path)
        if (pooling := find_pooling(path, told, wish_of(config))) is not None:
            family, spec = read_pooled_spec(told, pooling)
            tensors = planned_tensors(family.model_tensors(spec), told, config.weights, config.group_size)
            return footprint(spec, tensors, spec.kv_layout(config.kv_dtype)), []
        if not _has_weights(path):
            if budget is not None:
                return described_shape(told, config, budget)
            spec, tensors = tensors_of(told, config)
            size = footprint(spec, tensors, spec.kv_layout(config.kv_dtype))
            return size, [planned_line(spec, told, path, tensors)]
    opened = open_model(
        path, True, group_size=config.group_size, weights=config.weights, model_impl=config.model_impl
    )
    with opened.store.checkpoint:
        notes = fit_store(opened.store, budget) if budget is not None else []
    size = footprint(opened.spec, opened.store.tensors, opened.spec.kv_layout(config.kv_dtype))
    return size, notes or [kept_line(opened.spec, opened.store)]


def _has_weights(folder: Path) -> bool:
    """Whether a folder has all its weights as safetensors. A plan fetches none."""
    try:
        return bool(weight_files(folder))
    except CheckpointNotFound:
        return False


def tensors_of(config_json: dict[str, Any], config: EngineConfig) -> tuple[ModelSpec, ModelTensors]:
    """A model's numbers, and its tensors as they would be computed with. Raises as footprint_of() does."""
    family, spec = read_spec(config_json, config.model_impl)
    return spec, planned_tensors(family.model_tensors(spec), config_json, config.weights, config.group_size)
