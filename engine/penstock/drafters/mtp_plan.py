"""PlannedMTP: the head of multi-token prediction that a model came with, before the model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from penstock.config import CODE_GROUP_SIZES, EngineConfig
from penstock.drafters.draft_model import NUM_KV_TOKENS
from penstock.drafters.memory_beside import config_beside, is_on_card, machine_beside, plan_beside
from penstock.drafters.mtp_drafter import MAX_WAITING, MTPDrafter
from penstock.errors import CapacityError, ConfigError, MemoryName
from penstock.generation.drafting.choice import LEAST_GAIN
from penstock.generation.drafting.expectation import assumed_head, expected
from penstock.loader import LoadedModel, Model, PlannedModel, SharedEnds, begin_reading, plan_model
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.cost import predict_step
from penstock.memory.planning.plan import MemoryPlan, gib
from penstock.memory.planning.planner import plan_memory
from penstock.memory.planning.step_work import StepLoad
from penstock.model.footprint import footprint
from penstock.model.pooling.find_pooling import wish_of
from penstock.model.registry import OpenModel, open_mtp_head, read_spec
from penstock.spec import ExpertFootprint, ModelFootprint, ModelSpec
from penstock.weights.checkpoints.hub import find_model
from penstock.weights.store import planned_tensors

logger = logging.getLogger(__name__)
Drafter = TypeVar("Drafter", bound=MTPDrafter)


class PlannedMTP:
    """Files that are open, and a plan. Nothing is allocated."""

    def __init__(self, planned: PlannedModel) -> None:
        self._planned, self.plan = planned, planned.plan

    @classmethod
    def find(
        cls,
        model: str | Path,
        config: EngineConfig,
        offline: bool = False,
        revision: str | None = None,
        hardware: HardwareProfile | None = None,
    ) -> PlannedMTP | None:
        """The head of a model, by the model's name. None if config.mtp is "auto" and there is none, or none
        that can guess (_trouble()) or pays. Raises ConfigError and CapacityError if it is "on", and what
        Engine.load() raises."""
        folder = find_model(model, revision, offline, allow_pickle=config.allow_pickle)
        group_size = config.group_size if config.weights not in CODE_GROUP_SIZES else None
        opened = open_mtp_head(folder, group_size, config.allow_pickle, config.model_impl, wish_of(config))
        try:
            if trouble := _trouble(opened, config):
                raise ConfigError(f"{model} has no guesses by multi-token prediction: {trouble}")
            assert opened is not None
            found = cls(_plan(opened, config, hardware, model))
        except (ConfigError, CapacityError) as error:
            if opened is not None:
                opened.store.close()
            if config.mtp == "on":
                raise
            if opened is not None:
                logger.info("%s", error)
            return None
        except BaseException:
            if opened is not None:
                opened.store.close()
            raise
        try:
            is_worth_it = config.mtp != "auto" or found.pays(config)
        except BaseException:
            found.close()
            raise
        if not is_worth_it:
            found.close()
            return None
        return found

    def pays(self, config: EngineConfig) -> bool:
        """Whether one sequence should get more tokens per second than from the model with all of the memory.
        Not where rates were not measured, since there are no guesses then."""
        opened, hardware = self._planned.opened, self._planned.hardware
        family, spec = read_spec(opened.store.checkpoint.config, config.model_impl)
        tensors = planned_tensors(
            family.model_tensors(spec), opened.store.checkpoint.config, config.weights, config.group_size
        )
        size = footprint(spec, tensors, spec.kv_layout(config.kv_dtype))
        plain_s = _step_s(size, hardware, config)(1)
        if plain_s <= 0:
            return False
        try:
            left, machine = self.leave(config, hardware)
            predict_s = _step_s(size, machine, left)
        except CapacityError:  # the model needs the memory
            return False
        found = expected(assumed_head(self._level_s), 1, predict_s, config)
        return found.num_guesses > 0 and found.tokens_per_s * plain_s > LEAST_GAIN

    def _level_s(self, num_places: int) -> float:
        _, _, config, _, _, hardware, size, plan = self._planned
        return predict_step(plan, size, hardware, config, StepLoad.decode(num_places)).seconds

    def leave(
        self, config: EngineConfig, hardware: HardwareProfile | None
    ) -> tuple[EngineConfig, HardwareProfile]:
        """A config and a machine with the memory that the head leaves."""
        left = config_beside(config, self.plan)
        return left, machine_beside(config, hardware or self._planned.hardware, self.plan)

    def begin(self, model: Model) -> MTPDrafter:
        """Load the head for the model that it came with, whose embedding and head it shares."""
        embedding, head = model.executor.ends
        shared = SharedEnds(embedding.matrix("embedding"), head.matrix("head"))
        return begin_head(self._planned, model, shared, MTPDrafter)

    def close(self) -> None:
        """Close the files and the lane, if the head will not be loaded."""
        self._planned.lane.close()
        self._planned.opened.store.close()


def _step_s(size: ModelFootprint, hardware: HardwareProfile, config: EngineConfig) -> Callable[[int], float]:
    """Seconds of a step of the model, by its tokens; the memory of activations is an estimate."""
    plan = plan_memory(size, hardware, config)
    return lambda num_tokens: predict_step(plan, size, hardware, config, StepLoad.decode(num_tokens)).seconds


def _trouble(opened: OpenModel | None, config: EngineConfig) -> str:
    """Why there are no guesses, and what to do; empty if there can be."""
    if opened is None:
        return "its files hold no head that Penstock computes. Leave mtp out, and name a draft model"
    if config.draft_device == "cpu" and is_on_card(config):
        return (
            "the head's largest matrices are those of the model, which a GPU computes. Leave --draft-device "
            "out, or take --device cpu"
        )
    return why_not(opened)


def why_not(opened: OpenModel) -> str:
    """Why a head can't guess, and what to do; empty if it can."""
    if any(rope.short_length for rope in opened.spec.ropes):
        return "its rope depends on the length of a text. Name a small draft model in its place"
    return ""


def plan_head(
    opened: OpenModel,
    head: str,
    config: EngineConfig,
    hardware: HardwareProfile | None,
    with_states: Callable[[MemoryPlan, ModelSpec, int], MemoryPlan],
    shares_ends: bool = False,
) -> PlannedModel:
    """The plan of a head in a folder of its own, which people know as `head`. with_states() adds the memory
    of a step of so many tokens' hidden states. Raises ConfigError if the head can't guess, CapacityError if
    it would not stay in memory; the files are closed then."""
    try:
        if trouble := why_not(opened):
            raise ConfigError(f"{head} can't guess: {trouble}")

        def settle(planned: PlannedModel) -> PlannedModel:
            plan = with_states(planned.plan, opened.spec, planned.config.max_num_batched_tokens)
            check_stays(plan, head, "leave --draft-model out")
            return planned._replace(plan=plan)

        own = own_config(config, opened.spec.max_position_embeddings)
        return plan_beside(opened, own, config, hardware, settle, shares_ends)
    except BaseException:
        opened.store.close()
        raise


def begin_head(
    planned: PlannedModel,
    model: Model,
    shared: SharedEnds | None,
    drafter: Callable[[LoadedModel, Model, MemoryPlan], Drafter],
) -> Drafter:
    """Load a head for the model that it guesses for, which has matrices of the head's."""
    loaded = begin_reading(planned, model.tokenizer, shared=shared)
    try:
        loaded.model.streamer.tiers.wait_until_loaded()
        return drafter(loaded, model, planned.plan)
    except BaseException:
        loaded.model.close()
        raise


def check_stays(plan: MemoryPlan, head: str, advice: str) -> None:
    """Raises CapacityError for a head that this plan of its own does not keep in memory, or that takes more
    than a budget."""
    is_streamed = any(not layer.is_resident for layer in plan.layers)
    sizes: dict[MemoryName, tuple[int, int]] = {"host": (plan.host_used_bytes, plan.host_budget_bytes)}
    if plan.has_gpu:
        sizes["device"] = plan.device_used_bytes, plan.device_budget_bytes
    for memory, (used, budget) in sizes.items():
        if used > budget or (is_streamed and plan.has_gpu == (memory == "device")):
            raise CapacityError(
                f"{head} takes {gib(used)} of {memory} memory, and would not stay in {gib(budget)}. Raise "
                f"--{memory}-memory, or {advice}",
                memory,
            )


def with_waiting(plan: MemoryPlan, hidden_size: int) -> MemoryPlan:
    """A head's plan with the memory of the hidden states that wait for their tokens' turn."""
    return replace(plan, heard_bytes=plan.heard_bytes + 4 * MAX_WAITING * hidden_size)


def _plan(
    opened: OpenModel, config: EngineConfig, hardware: HardwareProfile | None, model: str | Path
) -> PlannedModel:
    """The plan within the memory of the whole model. Experts get no more than a layer's share of it."""
    num_layers = read_spec(opened.store.checkpoint.config, config.model_impl)[1].num_layers

    def settle(planned: PlannedModel) -> PlannedModel:
        fair = fair_config(planned.config, planned.plan, planned.size.experts, num_layers)
        if fair is not None:
            planned = plan_model(opened, fair, planned.lane, planned.hardware, shares_ends=True)
        check_stays(planned.plan, f"the head of multi-token prediction of {model}", "take --mtp off")
        return planned._replace(plan=with_waiting(planned.plan, opened.spec.hidden_size))

    own = own_config(config, opened.spec.max_position_embeddings)
    return plan_beside(opened, own, config, hardware, settle, shares_ends=True)


def fair_config(
    own: EngineConfig, plan: MemoryPlan, experts: ExpertFootprint, num_layers: int
) -> EngineConfig | None:
    """The head's config with budgets in which its experts have a layer's share of the memory that `plan` has,
    and at least room for two tokens. None if they have no more in that plan."""
    if not experts.count:
        return None
    least = min(2 * experts.count_per_token, experts.count)

    def excess(num_slots: int, budget: int) -> int:
        fair = budget // (num_layers + 1) // experts.num_bytes
        return max(0, num_slots - max(fair, least)) * plan.expert_slot_bytes

    on_host = plan.num_host_expert_slots if plan.has_gpu else plan.num_expert_slots
    host = excess(on_host, plan.host_budget_bytes)
    device = excess(plan.num_expert_slots, plan.device_budget_bytes) if plan.has_gpu else 0
    if not host and not device:
        return None
    return replace(
        own,
        host_memory_bytes=plan.host_used_bytes - host,
        device_memory_bytes=plan.device_used_bytes - device if plan.has_gpu else None,
    )


def own_config(config: EngineConfig, num_positions: int) -> EngineConfig:
    """The config of a head beside an engine of this config."""
    num_kv_tokens = min(NUM_KV_TOKENS, config.num_kv_tokens or NUM_KV_TOKENS)
    return EngineConfig(
        activations=config.activations,
        group_size=config.group_size,
        kernels=config.kernels,
        kernel_tuning=config.kernel_tuning,
        host_memory_bytes=config.host_memory_bytes,
        num_kv_tokens=num_kv_tokens,
        max_model_len=min(num_kv_tokens, num_positions),
        max_num_seqs=config.max_num_seqs,
        # A step's hidden states, and those that waited.
        max_num_batched_tokens=config.max_num_batched_tokens + MAX_WAITING,
        num_threads=config.num_threads,
        device="cpu",  # or the model's card: plan_beside()
        enable_prefix_caching=False,
        allow_pickle=config.allow_pickle,
    )
