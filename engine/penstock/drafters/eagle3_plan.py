"""PlannedEagle3: an EAGLE-3 head in a folder of its own, before the model is loaded that it guesses for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.config import CODE_GROUP_SIZES, EngineConfig
from penstock.drafters.eagle3_drafter import Eagle3Drafter
from penstock.drafters.mtp_plan import PlannedMTP, begin_head, plan_head, with_waiting
from penstock.errors import ConfigError
from penstock.goes_with import Feature, check_together
from penstock.loader import Model, PlannedModel, SharedEnds
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.plan import MemoryPlan
from penstock.model.heads.eagle3 import NUM_STATES, Eagle3, Eagle3Spec
from penstock.model.known_families import is_eagle3
from penstock.model.registry import OpenModel, checked_spec
from penstock.spec import ModelSpec
from penstock.weights.checkpoints.formats import open_checkpoint, read_config
from penstock.weights.checkpoints.hub import find_config, find_model
from penstock.weights.store import WeightStore


class PlannedEagle3(PlannedMTP):
    """Files that are open, and a plan. Nothing is allocated."""

    def __init__(self, planned: PlannedModel, name: str) -> None:
        super().__init__(planned)
        spec = planned.opened.spec
        assert isinstance(spec, Eagle3Spec)
        self._spec, self._name = spec, name

    @classmethod
    def open(
        cls, config: EngineConfig, offline: bool = False, hardware: HardwareProfile | None = None
    ) -> PlannedEagle3 | None:
        """The head that config.draft_model names; None if that is a whole model. Raises ConfigError if it
        should be a head and is none, or can't guess; CapacityError if it would not stay in memory; and what
        Engine.load() raises."""
        name = config.draft_model
        if name is None or not names_eagle3(name, config, offline):
            return None
        folder = find_model(name, None, offline, allow_pickle=config.allow_pickle)
        opened = open_eagle3(folder, config)
        planned = plan_head(opened, f"the EAGLE-3 head {name}", config, hardware, with_states)
        return cls(planned, name)

    def begin(self, model: Model) -> Eagle3Drafter:
        """Load the head for the model that it was trained for, whose embedding it shares if it has none."""
        check_target(self._name, self._spec, model.spec)
        embedding = model.executor.ends[0]
        shared = None if self._spec.has_embedding else SharedEnds(embedding.matrix("embedding"))
        return begin_head(self._planned, model, shared, Eagle3Drafter)


def check_target(name: str, head: Eagle3Spec, spec: ModelSpec) -> None:
    """Raises ConfigError unless the head of this name was trained for a model with such numbers, and
    UnsupportedModel for one with fewer layers."""
    check_together({Feature.EAGLE3, *spec.features}, spec.architecture)
    made_for = {"tokens": head.vocab_size, "numbers in a hidden state": head.target_size}
    given = {"tokens": spec.vocab_size, "numbers in a hidden state": spec.hidden_size}
    shares = head.has_embedding or head.hidden_size == spec.hidden_size
    if made_for != given or spec.row_size != spec.hidden_size or not shares:
        what = " and ".join(f"{count} {thing}" for thing, count in made_for.items())
        has = " and ".join(f"{count}" for count in given.values())
        raise ConfigError(
            f"the EAGLE-3 head {name} was made for another model: one with {what}; "
            f"{spec.architecture} here has {has}. Take the head that was trained for this model"
        )
    head.layers_of(spec.num_layers)


def with_states(plan: MemoryPlan, spec: ModelSpec, num_tokens: int) -> MemoryPlan:
    """A head's plan with the memory of a step's hidden states: copies of two layers', and all of them side by
    side, twice for a moment. What the projection reads is on the host, and so are its integers. The host has
    states that wait, too."""
    assert isinstance(spec, Eagle3Spec)
    state_bytes = 4 * num_tokens * spec.target_size
    plan = with_waiting(plan, spec.hidden_size)
    return replace(
        plan,
        workspace_bytes=plan.workspace_bytes + (2 + 2 * NUM_STATES) * state_bytes,
        heard_bytes=plan.heard_bytes + (2 * NUM_STATES * state_bytes if plan.has_gpu else 0),
    )


def names_eagle3(name: str, config: EngineConfig, offline: bool) -> bool:
    """Whether a draft model's name is that of an EAGLE-3 head. Raises ConfigError if it should be one."""
    path = find_config(name, None, offline)
    if found := not path.is_file() and is_eagle3(read_config(path)):
        return found
    if config.draft_with_eagle3:
        raise ConfigError(
            f"{name} is no EAGLE-3 head, by its config.json: for a whole model, take method draft_model"
        )
    return False


def read_eagle3(config_json: dict[str, Any]) -> Eagle3Spec:
    """A head's config.json as numbers. Raises UnsupportedModel and InvalidConfig."""
    spec = checked_spec(Eagle3, config_json, None)[1]
    assert isinstance(spec, Eagle3Spec)
    return spec


def open_eagle3(folder: Path, config: EngineConfig) -> OpenModel:
    """A head's folder, as INT8: in 4 bits heads guess far worse. Raises what open_model() raises."""
    checkpoint = open_checkpoint(folder, config.allow_pickle)
    try:
        _, spec = checked_spec(Eagle3, checkpoint.config, checkpoint.entries)
        checkpoint = Eagle3.separate(checkpoint, spec)
        group_size = config.group_size if config.weights not in CODE_GROUP_SIZES else None
        tensors, strict = Eagle3.model_tensors(spec), not config.ignore_unexpected_tensors
        store = WeightStore(checkpoint, tensors, not strict, group_size, "int8", False)
        return OpenModel(Eagle3, spec, store)
    except BaseException:
        checkpoint.close()
        raise
