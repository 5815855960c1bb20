"""Part: the layers of a model that one machine computes, planned and loaded there."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from penstock.config import EngineConfig, ResolvedConfig
from penstock.errors import ConfigError
from penstock.generation.model_inputs import ModelInputs
from penstock.kernels import QuantizedTensor
from penstock.kv_disk.fingerprint import arithmetic
from penstock.loader import LoadedModel, PlannedModel, SharedEnds, begin_reading, plan_model
from penstock.memory.hardware import HardwareProfile, capacities, num_physical_cores
from penstock.memory.lane import Lane, find_lane, gpu_trouble
from penstock.memory.planning.budgets import Budgets
from penstock.memory.planning.cost import UNKNOWN, predict_step
from penstock.memory.planning.planner import estimate_activations
from penstock.memory.planning.step_work import StepLoad
from penstock.model.footprint import footprint
from penstock.model.registry import OpenModel, open_model
from penstock.nodes.cut import MachineRates
from penstock.nodes.identity import model_digest
from penstock.nodes.layer_range import check_model, layer_range
from penstock.nodes.orders import Order, Planned, Survey
from penstock.text.tokenizer import NoText
from penstock.weights.checkpoints.hub import find_model


def open_part(model: str, config: EngineConfig, offline: bool) -> OpenModel:
    """The whole model, of which layer_range() makes a part. Raises kinds of CheckpointError."""
    folder = find_model(model, None, offline, allow_pickle=config.allow_pickle)
    opened = open_model(
        folder,
        config.ignore_unexpected_tensors,
        config.group_size,
        config.allow_pickle,
        config.weights,
        model_impl=config.model_impl,
    )
    check_model(opened)
    return opened


def rates_of(
    opened: OpenModel, config: EngineConfig, hardware: HardwareProfile, has_ends: bool
) -> MachineRates:
    """What a machine has for layers: its budget without the largest step's activations (an estimate) and,
    `has_ends`, without embedding and head."""
    size, lane = footprint(opened.spec, opened.store.tensors), hardware.lane
    fixed = estimate_activations(size, config)
    other_s = 0.0
    if has_ends:
        fixed += size.embedding_bytes + size.head_bytes
        other_s = size.head_elements / lane.memory_gbps / 1e9 if lane.memory_gbps else 0.0
    disk_gbps = hardware.disk.read_gbps if hardware.disk else 0.0
    streaming = lane.link_gbps if lane.has_own_memory else disk_gbps
    room = max(0, Budgets(hardware, config).computing - fixed)
    return MachineRates(room, lane.memory_gbps, streaming, other_s)


def survey(opened: OpenModel, config: EngineConfig, hardware: HardwareProfile) -> Survey:
    """What the leader asks first."""
    rates = rates_of(opened, config, hardware, has_ends=False)
    return Survey(
        model_digest(opened), rates.num_bytes, rates.memory_gbps, rates.streaming_gbps, own_arithmetic(config)
    )


def own_arithmetic(config: EngineConfig) -> str:
    """Machines with equal texts round alike."""
    kernels = "native" if config.kernels == "auto" else config.kernels
    resolved = ResolvedConfig.of(
        replace(
            config,
            kernels=kernels,
            device=_device(config),
            num_threads=config.num_threads or num_physical_cores(),
        ),
        2,
    )
    facts = arithmetic(resolved, "penstock")
    facts.pop("code")
    return json.dumps(facts, sort_keys=True)


def _device(config: EngineConfig) -> str:
    """What find_lane() takes."""
    if config.device != "auto":
        return config.device
    return "cuda" if gpu_trouble() is None else "cpu"


class Part:
    """Computes steps on the last layers of a model, or on some before. The ends are the leader's."""

    def __init__(self, planned: PlannedModel, order: Order) -> None:
        self._planned = planned
        self._order = order
        self._loaded: LoadedModel | None = None

    @classmethod
    def plan(
        cls,
        order: Order,
        model: str,
        own: EngineConfig,
        offline: bool,
        hardware: HardwareProfile | None,
        cache_folder: Path | None = None,
    ) -> Part:
        """Raises CapacityError, ConfigError and kinds of CheckpointError."""
        config = order.config(own)
        opened = open_part(model, config, offline)
        try:
            if model_digest(opened) != order.digest:
                raise ConfigError(
                    f"{model} is another model on this machine than the leader's: its config.json, tensors "
                    "or norms differ. Bring the same files here"
                )
            if order.stop > opened.spec.num_layers:
                raise ConfigError(f"layers up to {order.stop} of {opened.spec.num_layers} make no sense")
            lane: Lane = find_lane(config.device)
            try:
                planned = plan_model(
                    layer_range(opened, order.layers),
                    config,
                    lane,
                    hardware or capacities(),
                    cache_folder,
                    shares_ends=True,
                )
            except BaseException:
                lane.close()
                raise
        except BaseException:
            opened.store.close()
            raise
        return cls(planned._replace(size=replace(planned.size, head_elements=0)), order)

    @property
    def planned(self) -> Planned:
        plan, config = self._planned.plan, self._planned.config
        sizes = [1]
        while sizes[-1] < config.max_num_batched_tokens:
            sizes.append(min(2 * sizes[-1], config.max_num_batched_tokens))
        steps = [
            predict_step(plan, self._planned.size, self._planned.hardware, config, StepLoad(size, 0))
            for size in sizes
        ]
        return Planned(
            plan.num_kv_tokens,
            plan.num_resident_layers,
            plan.device_used_bytes or plan.host_used_bytes,
            plan.device_budget_bytes or plan.host_budget_bytes,
            [[step.num_tokens, step.seconds] for step in steps if step is not UNKNOWN],
        )

    @property
    def is_loaded(self) -> bool:
        return self._loaded is not None

    @property
    def loaded(self) -> LoadedModel:
        """After load()."""
        assert self._loaded is not None, "load() comes first"
        return self._loaded

    def load(self, cache_folder: Path | None = None) -> None:
        """Allocate memory and begin to read. The ends of the model are not read. Raises CapacityError."""
        nothing = QuantizedTensor(torch.zeros(1, 1, dtype=torch.int8), torch.ones(1))
        self._loaded = begin_reading(
            self._planned, NoText(), cache_folder, shared=SharedEnds(nothing, nothing)
        )

    def serves(self, order: Order) -> bool:
        """Whether these are the layers that an order is about, loaded with the same settings."""
        return self._loaded is not None and asdict(order) == asdict(self._order)

    def compute(self, inputs: ModelInputs, hidden: Tensor, wanted: Tensor | None) -> Tensor:
        """The hidden states after the layers, on the host: of the wanted rows, or (None) of all. Raises
        CorruptFile and other kinds of CheckpointError."""
        executor = self.loaded.model.executor
        found = executor.sweep(inputs, hidden=hidden)
        if wanted is not None:
            found = found[wanted.to(found.device)]
        found = found.to("cpu")
        self.loaded.model.streamer.synchronize()
        return found

    def close(self) -> None:
        if self._loaded is not None:
            self._loaded.model.close()
        else:
            self._planned.lane.close()
            self._planned.opened.store.close()
