"""A model that is not loaded, as a plan needs it: its footprint, by config.json or a GGUF file's header, and
the estimated plan of its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.config import EngineConfig
from penstock.kernels import PlanesTensor, expected_traits
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.plan import MemoryPlan
from penstock.memory.planning.planner import plan_memory
from penstock.model.pooling.find_pooling import wish_of
from penstock.model.registry import open_model, pooling_of, read_pooled_spec, read_spec
from penstock.model.shapes import footprint
from penstock.spec import ModelFootprint, ModelSpec
from penstock.weights.checkpoints.formats import read_config
from penstock.weights.store import planned_tensors
from penstock.weights.tensors import ModelTensors


def estimated_plan(size: ModelFootprint, hardware: HardwareProfile, config: EngineConfig) -> MemoryPlan:
    """The plan for a model that is not loaded; the memory of activations is an estimate. Raises
    CapacityError, as plan_memory() does, and ConfigError for layers that no kernels of the device compute."""
    device = hardware.device
    traits = expected_traits(config, None if device is None else device.compute_capability)
    traits.require_recurrence(size.state_bytes)
    traits.require_matrices((PlanesTensor,) if size.lower_planes else ())
    return plan_memory(size, hardware, config, workspace_factor=traits.workspace_factor)


def footprint_of(config_json: dict[str, Any], config: EngineConfig) -> ModelFootprint:
    """The facts about a model that a plan needs, from config.json. Raises UnsupportedModel, InvalidConfig."""
    spec, tensors = tensors_of(config_json, config)
    return footprint(spec, tensors, spec.kv_layout(config.kv_dtype))


def footprint_at(path: Path, config: EngineConfig) -> ModelFootprint:
    """The same for a model's folder, of which config.json is enough, or for a GGUF file, whose header says
    how each tensor is kept. Raises CheckpointError."""
    if not path.is_file():
        told = read_config(path)
        if (pooling := pooling_of(path, told, wish_of(config))) is None:
            return footprint_of(told, config)
        family, spec = read_pooled_spec(told, pooling)
        tensors = planned_tensors(family.model_tensors(spec), told, config.weights, config.group_size)
        return footprint(spec, tensors, spec.kv_layout(config.kv_dtype))
    opened = open_model(
        path, group_size=config.group_size, weights=config.weights, model_impl=config.model_impl
    )
    opened.store.close()
    return footprint(opened.spec, opened.store.tensors, opened.spec.kv_layout(config.kv_dtype))


def tensors_of(config_json: dict[str, Any], config: EngineConfig) -> tuple[ModelSpec, ModelTensors]:
    """A model's numbers, and its tensors as they would be computed with. Raises as footprint_of() does."""
    family, spec = read_spec(config_json, config.model_impl)
    return spec, planned_tensors(family.model_tensors(spec), config_json, config.weights, config.group_size)
