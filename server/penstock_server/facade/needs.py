"""What models take and are, as their files say before they are loaded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from penstock import EngineConfig, WeightFacts
from penstock.errors import CapacityError, ConfigError
from penstock.kernels import expected_traits
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.budgets import Budgets
from penstock.memory.planning.kv_blocks import USUAL_TOKENS, check_context
from penstock.memory.planning.plan import MemoryPlan
from penstock.memory.planning.planner import plan_memory
from penstock.model.footprint import footprint
from penstock.model.pooling.find_pooling import wish_of
from penstock.model.pooling.pooling_config import pooling_config
from penstock.model.registry import open_model
from penstock.spec import ModelFootprint, ModelSpec
from penstock.weights.adapters.loaded_adapters import with_adapter_bytes
from penstock_server.facade.loading import find_folder
from penstock_server.facade.machine import profile
from penstock_server.facade.model import task_of
from penstock_server.settings.settings import Settings

#: Memory that no model needs.
_ENDLESS = 1 << 60
#: Sequences of the usual length whose keys and values have room beside a model that shares the memory.
_NUM_SEQS = 8


@dataclass(frozen=True)
class ModelNeeds:
    """The facts about a model that is not loaded."""

    #: Host memory with which no layer is streamed, and keys and values have some room.
    resident_bytes: int
    weights: WeightFacts
    architecture: str = ""
    hidden_size: int = 0
    vocab_size: int = 0
    #: Tokens of the model's own context.
    max_position_embeddings: int = 0
    #: As ServedModel has it.
    task: str = "generate"


@dataclass(frozen=True)
class Survey:
    """The models of a server, and the memory that they share."""

    budget_bytes: int
    #: In the order of the models.
    needs: tuple[ModelNeeds, ...]


def estimated_plan(size: ModelFootprint, hardware: HardwareProfile, config: EngineConfig) -> MemoryPlan:
    """The plan for a model that is not loaded; the memory of activations is an estimate. Raises
    CapacityError, as plan_memory() does."""
    device = hardware.device
    traits = expected_traits(config, None if device is None else device.compute_capability)
    return plan_memory(size, hardware, config, workspace_factor=traits.workspace_factor)


def survey(each: Sequence[Settings], pinned: Collection[int]) -> Survey:
    """Looks at the files of all models; nothing is loaded, and what is not here yet is fetched.

    each: the settings of each model. pinned: the places of those that always stay loaded. Raises
    PenstockError: CapacityError for a model that could not be loaded beside the pinned ones, ConfigError for
    one whose context is shorter than the config's."""
    hardware = profile(each[0], None, measures_disk=False)
    budget = Budgets(hardware, each[0].engine_config()).host
    sizes = [_size(settings) for settings in each]
    needs = tuple(_needs(*of_model, hardware, budget) for of_model in sizes)
    for index, ((_, size, config, *_), settings) in enumerate(zip(sizes, each, strict=True)):
        left = budget - sum(needs[other].resident_bytes for other in pinned if other != index)
        _check(settings.model_names[0], config, size, hardware, left)
    return Survey(budget, needs)


def _size(settings: Settings) -> tuple[ModelSpec, ModelFootprint, EngineConfig, str, WeightFacts]:
    """What a model is and takes, its config as loading it will have it, its task, and its weights. Raises
    PenstockError."""
    # A share of the memory is given to each model that is loaded, so none stays partly on disk by default.
    config = with_adapter_bytes(replace(settings, host_memory=_ENDLESS).engine_config())
    opened = open_model(
        find_folder(settings),
        settings.ignore_unexpected_tensors,
        settings.group_size,
        settings.allow_pickle,
        settings.weights,
        model_impl=settings.model_impl,
        wish=wish_of(config),
    )
    opened.store.close()
    spec = opened.spec
    if opened.pooling is not None:
        config = pooling_config(config, spec, opened.pooling)
    size = footprint(spec, opened.store.tensors, spec.kv_layout(settings.kv_dtype))
    return spec, size, config, task_of(opened.pooling), opened.store.facts


def _needs(
    spec: ModelSpec,
    size: ModelFootprint,
    config: EngineConfig,
    task: str,
    weights: WeightFacts,
    hardware: HardwareProfile,
    budget: int,
) -> ModelNeeds:
    """On a GPU, a model takes the whole room: its layers are spread over both memories."""
    plan = estimated_plan(size, hardware, _roomy(config))
    return ModelNeeds(
        budget if plan.has_gpu else plan.host_used_bytes,
        weights,
        spec.architecture,
        spec.hidden_size,
        spec.vocab_size,
        spec.max_position_embeddings,
        task,
    )


def _roomy(config: EngineConfig) -> EngineConfig:
    """The config with memory for everything, and keys and values as the config has them, or else for some
    sequences of the usual length: the planner would like to have many."""
    config = replace(config, host_memory_bytes=_ENDLESS)
    if config.num_kv_tokens is None and config.kv_cache_bytes is None:
        num_tokens = max(config.max_model_len or 0, _NUM_SEQS * USUAL_TOKENS)
        config = replace(config, num_kv_tokens=num_tokens, kv_cache_share=None)
    return config


def _check(
    name: str, config: EngineConfig, size: ModelFootprint, hardware: HardwareProfile, left: int
) -> None:
    try:
        check_context(config, size)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    try:
        if left <= 0:
            raise CapacityError("the pinned models take all of the memory")
        estimated_plan(size, hardware, replace(config, host_memory_bytes=left))
    except CapacityError as error:
        raise CapacityError(f"{name} can't be loaded while these pinned models are: {error}") from error
