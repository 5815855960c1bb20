"""Short ways to the layers of a model with one stack, for tests."""

from __future__ import annotations

from collections.abc import Collection

import torch

from penstock.memory.host_lane import HostLane
from penstock.memory.planning.plan import TierPlan
from penstock.spec import DECODER, UnitKey
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.store import WeightStore
from penstock.weights.streamer import LayerStreamer
from penstock.weights.tensors import ModelTensors
from penstock.weights.tiers.tier import UnitReader


def layer_key(index: int) -> UnitKey:
    return UnitKey(DECODER, index)


def layer_bytes(store: WeightStore, index: int = 0) -> int:
    return store.units[layer_key(index)].num_bytes


def read_layer(store: WeightStore, index: int = 0) -> LayerWeights:
    """A layer, into memory of its own."""
    return store.read_unit(layer_key(index), torch.empty(layer_bytes(store, index), dtype=torch.uint8))


def host_streamer(
    tensors: ModelTensors, reader: UnitReader, resident: Collection[int], num_slots: int
) -> LayerStreamer:
    """From disk to RAM, with room for all experts."""
    num_experts = sum(unit.key.expert is not None for unit in tensors.units)
    return LayerStreamer(
        tensors, reader, HostLane(), (TierPlan(frozenset(resident), num_slots, num_experts),)
    )
