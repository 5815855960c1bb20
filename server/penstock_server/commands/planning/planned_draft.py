"""PlannedDraft: what would guess beside a model that is not loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.config import EngineConfig
from penstock.drafters import dflash_plan, mtp_plan
from penstock.drafters.dflash_drafter import load_of_pass
from penstock.drafters.draft_model import check_plan, own_config
from penstock.drafters.eagle3_plan import names_eagle3, read_eagle3, with_states
from penstock.drafters.memory_beside import card_bytes, config_beside, machine_beside
from penstock.drafters.planes_drafter import (
    NO_PLANES,
    check_upper_planes,
    guess_share,
    pass_s,
)
from penstock.errors import CapacityError, ConfigError
from penstock.generation.drafting.expectation import (
    Assumed,
    assumed_dflash,
    assumed_eagle3,
    assumed_head,
    assumed_model,
    assumed_planes,
)
from penstock.kernels import multiplies_bytes
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.cost import Predict, predict_step
from penstock.memory.planning.plan import MemoryPlan
from penstock.memory.planning.step_work import StepLoad
from penstock.model.footprint import footprint
from penstock.model.heads.dflash import DFlash
from penstock.model.heads.eagle3 import Eagle3
from penstock.model.known_shapes import find_shape
from penstock.model.registry import read_spec
from penstock.spec import ModelFootprint
from penstock.weights.checkpoints.formats import read_config
from penstock.weights.checkpoints.hub import find_config
from penstock.weights.store import planned_tensors
from penstock.weights.tensors import UnitLayout, beside_shared
from penstock_server.commands.planning.drafted_pair import is_shape
from penstock_server.commands.planning.footprints import footprint_at, footprint_of
from penstock_server.facade.needs import estimated_plan
from penstock_server.settings.settings import Settings


def assumed_beside(
    plan: MemoryPlan,
    predict: Predict,
    config: EngineConfig,
    draft: PlannedDraft | None,
) -> list[Assumed]:
    """The drafter of a model with this plan. predict: of its steps on this machine. Raises CapacityError if
    upper planes that should guess are streamed, and ConfigError for a model that has none."""
    if not config.draft_with_planes:
        return [] if draft is None else [draft.drafter]
    is_shared = plan.kept_share is not None  # a layer's rest is no plane
    if not (plan.keeps_upper if is_shared else any(layer.is_lower for layer in plan.layers)):
        raise ConfigError(NO_PLANES)
    check_upper_planes(plan)
    share = guess_share(config.rows_per_token, plan.has_gpu or multiplies_bytes(config))
    return [assumed_planes(functools.partial(pass_s, plan, predict, share))]


@dataclass(frozen=True)
class PlannedDraft:
    """A draft model that is not loaded."""

    plan: MemoryPlan
    drafter: Assumed

    @property
    def used_bytes(self) -> tuple[int, int]:
        """Bytes of the host's memory, and of a GPU's."""
        return self.plan.host_used_bytes, card_bytes(self.plan)

    def beside(self, config: EngineConfig, hardware: HardwareProfile) -> tuple[EngineConfig, HardwareProfile]:
        """A config and a machine with the memory that the draft model leaves. Raises CapacityError."""
        return config_beside(config, self.plan), machine_beside(config, hardware, self.plan)


def planned_draft(settings: Settings, hardware: HardwareProfile, config: EngineConfig) -> PlannedDraft | None:
    """The draft model of the config: a model's name or a known shape. Raises CapacityError if it does not
    stay in memory, and ConfigError for a kind of model that can't draft."""
    if config.draft_model is None:
        return None
    if not is_shape(config.draft_model) and dflash_plan.names_dflash(config.draft_model, settings.offline):
        dflash_plan.check_place(config.draft_model, config, hardware.device is not None)
        return _draft_on(settings, hardware, config)
    if hardware.device is not None and config.draft_device == "auto":
        # The processor computes it then, or it can't be computed anywhere.
        with contextlib.suppress(CapacityError, ConfigError):
            return _draft_on(settings, hardware, config)
    return _draft_on(settings, dataclasses.replace(hardware, device=None), config)


def _draft_on(settings: Settings, hardware: HardwareProfile, config: EngineConfig) -> PlannedDraft:
    """The draft model where this machine computes."""
    name, own = config.draft_model, _within(own_config(config), hardware, config)
    assert name is not None
    if is_shape(name):
        size = footprint_of(find_shape(name), own)
    elif names_eagle3(name, config, settings.offline):
        config_json = read_config(find_config(name, None, settings.offline))
        return _planned_eagle3(name, config_json, hardware, config)
    elif dflash_plan.names_dflash(name, settings.offline):
        config_json = read_config(find_config(name, None, settings.offline))
        return _planned_dflash(name, config_json, hardware, config)
    else:
        size = footprint_at(find_config(name, None, settings.offline), own)
    own = _within(own_config(config, size.state_bytes), hardware, config)
    plan = estimated_plan(size, hardware, own)
    check_plan(name, plan)
    assumed = assumed_model(size.token_elements + size.head_elements, _level_s(plan, size, hardware, own))
    return PlannedDraft(plan, assumed)


def _within(own: EngineConfig, hardware: HardwareProfile, config: EngineConfig) -> EngineConfig:
    """The drafter's config, with the model's budget of the memory in which this machine computes."""
    budget = config.device_memory_bytes if hardware.device is not None else None
    return dataclasses.replace(own, device_memory_bytes=budget)


def _level_s(
    plan: MemoryPlan, size: ModelFootprint, hardware: HardwareProfile, own: EngineConfig
) -> Callable[[int], float]:
    return lambda num_places: predict_step(plan, size, hardware, own, StepLoad.decode(num_places)).seconds


def _planned_eagle3(
    name: str, config_json: dict[str, Any], hardware: HardwareProfile, config: EngineConfig
) -> PlannedDraft:
    """An EAGLE-3 head in a folder of its own. An embedding that its files may hold is taken for the model's:
    config.json does not tell."""
    spec = read_eagle3(config_json)
    own = _within(mtp_plan.own_config(config, spec.max_position_embeddings), hardware, config)
    tensors = Eagle3.model_tensors(dataclasses.replace(spec, has_embedding=False))
    tensors = planned_tensors(tensors, config_json, "int8", own.group_size)
    size = footprint(spec, tensors, spec.kv_layout(own.kv_dtype))
    plan = with_states(estimated_plan(size, hardware, own), spec, own.max_num_batched_tokens)
    mtp_plan.check_stays(plan, f"the EAGLE-3 head {name}", "leave --draft-model out")
    return PlannedDraft(plan, assumed_eagle3(_level_s(plan, size, hardware, own)))


def _planned_dflash(
    name: str, config_json: dict[str, Any], hardware: HardwareProfile, config: EngineConfig
) -> PlannedDraft:
    """A DFlash head in a folder of its own, whose embedding and head are the model's."""
    spec = dflash_plan.read_dflash(config_json)
    own = _within(mtp_plan.own_config(config, spec.max_position_embeddings), hardware, config)
    tensors = planned_tensors(DFlash.model_tensors(spec), config_json, "int8", own.group_size)
    size = footprint(spec, tensors, spec.kv_layout(own.kv_dtype))
    embedding, head = (UnitLayout.of(beside_shared(end)) for end in (tensors.embedding, tensors.head))
    size = dataclasses.replace(size, embedding_bytes=embedding.num_bytes, head_bytes=head.num_bytes)
    plan = dflash_plan.with_states(estimated_plan(size, hardware, own), spec, own.max_num_batched_tokens)
    mtp_plan.check_stays(plan, f"the DFlash head {name}", "leave --draft-model out")

    def pass_s(num_seqs: int) -> float:
        return predict_step(plan, size, hardware, own, load_of_pass(spec, num_seqs)).seconds

    return PlannedDraft(plan, assumed_dflash(pass_s, spec.num_guesses))


def planned_head(
    config_json: dict[str, Any], hardware: HardwareProfile, config: EngineConfig
) -> PlannedDraft | None:
    """The head of multi-token prediction that config.json tells of, if it would guess."""
    if config.mtp == "off" or config.draft_model is not None or config.draft_with_planes:
        return None
    if hardware.device is not None and config.draft_device == "cpu":
        return None  # its largest matrices are the model's
    family, spec = read_spec(config_json, config.model_impl)
    head = family.mtp_spec(spec, None)
    if head is None:
        if config.mtp == "on":
            raise ConfigError(
                f"{spec.architecture} has no guesses by multi-token prediction: its config.json tells of no "
                "head that Penstock computes. Leave mtp out, and name a draft model"
            )
        return None
    own = _within(mtp_plan.own_config(config, head.max_position_embeddings), hardware, config)
    tensors = planned_tensors(family.model_tensors(head), config_json, "int8", own.group_size)
    size = footprint(head, tensors, head.kv_layout(own.kv_dtype))
    size = dataclasses.replace(size, embedding_bytes=0, head_bytes=0)  # the model's
    plan = estimated_plan(size, hardware, own)
    fair = mtp_plan.fair_config(own, plan, size.experts, spec.num_layers)
    if fair is not None:
        own, plan = fair, estimated_plan(size, hardware, fair)
    plan = mtp_plan.with_waiting(plan, head.hidden_size)
    return PlannedDraft(plan, assumed_head(_level_s(plan, size, hardware, own)))
