"""Models of a given shape with random quantized weights, in memory: speed needs no training."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.engine_parts import make_parts
from penstock.loader import begin_reading, plan_on, settle_processor
from penstock.memory.host_lane import HostLane
from penstock.model.family import Family
from penstock.model.registry import OpenModel, find_family
from penstock.spec import UnitKey
from penstock.text.tokenizer import NoText
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.store import quantized_tensors
from penstock.weights.tensors import ModelTensors, TensorSpec, UnitLayout


class RandomStore:
    """A WeightStore that invents what it would read: integers over the whole range, scales that keep
    activations of the size of trained ones."""

    def __init__(self, tensors: ModelTensors) -> None:
        self.tensors = tensors
        self.units = {unit.key: unit for unit in tensors.units}
        self.bytes_read = 0
        self.checkpoint = SimpleNamespace(folder="random weights")

    def contiguous(self, tensors: tuple[TensorSpec, ...]) -> None:
        return None

    def contiguous_unit(self, key: UnitKey) -> None:
        return None

    def read_unit(self, key: UnitKey, buffer: Tensor, num_threads: int = 1) -> LayerWeights:
        return _fill(self.units[key].layout, buffer)

    def read_resident(self, tensors: tuple[TensorSpec, ...]) -> LayerWeights:
        layout = UnitLayout.of(tensors)
        return _fill(layout, torch.empty(layout.num_bytes, dtype=torch.uint8))

    def close(self) -> None: ...


def _fill(layout: UnitLayout, buffer: Tensor) -> LayerWeights:
    generator = torch.Generator().manual_seed(0)
    for slot in layout.slots:
        slot.tensor.format.fill_random(slot.arrays(buffer), generator)
    return LayerWeights.views(layout, buffer)


def synthetic_engine(
    shape: dict[str, Any], config: EngineConfig, num_kv_tokens: int, family: type[Family] | None = None
) -> Engine:
    """An engine of this shape, all resident. `family`: None takes Penstock's own."""
    family = family or find_family(shape)
    spec = family.read_spec(shape)
    tensors = quantized_tensors(family.model_tensors(spec), {}, config.weights, config.group_size)
    store: Any = RandomStore(tensors)
    config = replace(config, num_kv_tokens=num_kv_tokens, enable_prefix_caching=False, device="cpu")
    settle_processor(config)
    planned = plan_on(HostLane(), OpenModel(family, spec, store), config)
    loaded = begin_reading(planned, NoText())
    engine = Engine(make_parts(loaded))
    engine.streamer.tiers.wait_until_loaded()
    return engine


def step_weight_bytes(engine: Engine) -> int:
    """Bytes of weights that a step reads: all layers and the head, but only rows of the embedding."""
    return engine.model.store.tensors.layer_bytes + UnitLayout.of(engine.model.store.tensors.head).num_bytes
