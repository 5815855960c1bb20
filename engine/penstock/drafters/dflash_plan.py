"""PlannedDFlash: a DFlash head in a folder of its own, before the model is loaded that it guesses for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.config import CODE_GROUP_SIZES, EngineConfig
from penstock.drafters.dflash_drafter import DFlashDrafter
from penstock.drafters.memory_beside import is_on_card
from penstock.drafters.mtp_plan import PlannedMTP, begin_head, plan_head, with_waiting
from penstock.errors import ConfigError
from penstock.goes_with import Feature, check_together
from penstock.loader import Model, PlannedModel, SharedEnds
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.plan import MemoryPlan
from penstock.model.heads.dflash import DFlash, DFlashSpec
from penstock.model.known_families import is_dflash
from penstock.model.registry import OpenModel, checked_spec
from penstock.spec import ModelSpec
from penstock.weights.checkpoints.formats import open_checkpoint, read_config
from penstock.weights.checkpoints.hub import find_config, find_model
from penstock.weights.store import WeightStore
from penstock.weights.tensors import beside_shared


class PlannedDFlash(PlannedMTP):
    """Files that are open, and a plan. Nothing is allocated."""

    def __init__(self, planned: PlannedModel, name: str) -> None:
        super().__init__(planned)
        self._name = name

    @classmethod
    def open(
        cls, config: EngineConfig, offline: bool = False, hardware: HardwareProfile | None = None
    ) -> PlannedDFlash | None:
        """The head that config.draft_model names; None if that is none. Raises ConfigError for a head that
        can't guess, CapacityError if it would not stay in memory, and what Engine.load() raises."""
        name = config.draft_model
        if name is None or not names_dflash(name, offline):
            return None
        check_place(name, config, is_on_card(config))
        folder = find_model(name, None, offline, allow_pickle=config.allow_pickle)
        opened = open_dflash(folder, config)
        head = f"the DFlash head {name}"
        return cls(plan_head(opened, head, config, hardware, with_states, shares_ends=True), name)

    def begin(self, model: Model) -> DFlashDrafter:
        """Load the head for the model that it was trained for, whose embedding and head it shares."""
        check_target(self._name, self._planned.opened.spec, model.spec)
        embedding, head = model.executor.ends
        shared = SharedEnds(embedding.matrix("embedding"), head.matrix("head"))
        return begin_head(self._planned, model, shared, DFlashDrafter)


def check_place(name: str, config: EngineConfig, is_on_card: bool) -> None:
    """Raises ConfigError for a head that should not compute where the model does."""
    if config.draft_device == "cpu" and is_on_card:
        raise ConfigError(
            f"the DFlash head {name} can't guess: its largest matrices are those of the model, which a GPU "
            "computes. Leave --draft-device out, or take --device cpu"
        )


def check_target(name: str, head: ModelSpec, spec: ModelSpec) -> None:
    """Raises ConfigError unless the head of this name was trained for a model with such numbers, and
    UnsupportedModel for one with other layers."""
    assert isinstance(head, DFlashSpec)
    check_together({Feature.DRAFT_MODEL, *spec.features}, spec.architecture)
    made_for, given = (head.vocab_size, head.hidden_size), (spec.vocab_size, spec.hidden_size)
    if made_for != given or spec.row_size != spec.hidden_size:
        raise ConfigError(
            f"the DFlash head {name} was made for another model: one with {made_for[0]} tokens and "
            f"{made_for[1]} numbers in a hidden state; {spec.architecture} here has {given[0]} and "
            f"{given[1]}. Take the head that was trained for this model"
        )
    head.layers_of(spec.num_layers)


def with_states(plan: MemoryPlan, spec: ModelSpec, num_tokens: int) -> MemoryPlan:
    """A head's plan with the memory of a step's hidden states: copies of each layer's that are read, and all
    of them side by side, twice for a moment. What the projection reads is on the host, and so are its
    integers. The host has states that wait, too."""
    assert isinstance(spec, DFlashSpec)
    state_bytes = 4 * num_tokens * spec.hidden_size * spec.num_states
    plan = with_waiting(plan, spec.hidden_size)
    return replace(
        plan,
        workspace_bytes=plan.workspace_bytes + 3 * state_bytes,
        heard_bytes=plan.heard_bytes + (2 * state_bytes if plan.has_gpu else 0),
    )


def names_dflash(name: str, offline: bool) -> bool:
    """Whether a draft model's name is that of a DFlash head."""
    path = find_config(name, None, offline)
    return not path.is_file() and is_dflash(read_config(path))


def read_dflash(config_json: dict[str, Any]) -> DFlashSpec:
    """A head's config.json as numbers. Raises UnsupportedModel and InvalidConfig."""
    spec = checked_spec(DFlash, config_json, None)[1]
    assert isinstance(spec, DFlashSpec)
    return spec


def open_dflash(folder: Path, config: EngineConfig) -> OpenModel:
    """A head's folder, as INT8: in 4 bits heads guess far worse. Raises what open_model() raises."""
    checkpoint = open_checkpoint(folder, config.allow_pickle)
    try:
        _, spec = checked_spec(DFlash, checkpoint.config, checkpoint.entries)
        DFlash.check_tensors(checkpoint.entries)
        group_size = config.group_size if config.weights not in CODE_GROUP_SIZES else None
        tensors, strict = DFlash.model_tensors(spec), not config.ignore_unexpected_tensors
        ends = beside_shared(tensors.embedding), beside_shared(tensors.head)
        own = replace(tensors, embedding=ends[0], head=ends[1], has_logits=False)
        store = WeightStore(checkpoint, own, not strict, group_size, "int8", False)
        whole = replace(store.tensors, embedding=tensors.embedding, head=tensors.head, has_logits=True)
        store.keep(whole)  # of which the model has the ends
        return OpenModel(DFlash, spec, store)
    except BaseException:
        checkpoint.close()
        raise
