"""plan_model(): kernels, measured activations and a plan for a model whose files are open. Nothing is
allocated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from penstock.config import EngineConfig
from penstock.errors import CapacityError
from penstock.generation.warm_up import ZeroProducts, largest_step, measure_activations
from penstock.kernels import Kernels, choose_kernels, host_kernels
from penstock.loader.parts import PlannedModel
from penstock.loader.processor import threads_of, tuned
from penstock.memory.hardware import (
    HardwareProfile,
    capacities,
)
from penstock.memory.lane import Lane
from penstock.memory.pages import round_up
from penstock.memory.planning.kv_blocks import USUAL_TOKENS, context
from penstock.memory.planning.plan import gib
from penstock.memory.planning.planner import plan_memory
from penstock.model.footprint import footprint
from penstock.model.registry import OpenModel
from penstock.spec import KVLayout, ModelSpec, UnitKey
from penstock.weights.tensors import ModelTensors, UnitLayout, beside_shared

#: Bytes of activations, by all that they depend on: a model that comes back does not compute its largest step
#: again. The oldest one goes when there are too many.
_measured: dict[tuple[object, ...], int] = {}
_MOST_MEASURED = 32


def plan_model(
    opened: OpenModel,
    config: EngineConfig,
    lane: Lane,
    hardware: HardwareProfile | None = None,
    cache_folder: Path | None = None,
    kernels: Kernels | None = None,
    shares_ends: bool = False,
) -> PlannedModel:
    """Plan the memory. `kernels` replace those that the config asks for. `shares_ends`: the matrices of
    embedding and head will be another model's. Raises ConfigError and CapacityError."""
    if lane.choice == "cpu":
        config = tuned(config, hardware)
    kernels, config = _kernels(config, lane, cache_folder, kernels)
    if opened.pooling is not None:
        from penstock.model.pooling.pooling_config import pooling_config

        config = pooling_config(config, opened.spec, opened.pooling)
    kv_layout = opened.spec.kv_layout(config.kv_dtype)
    tensors = opened.store.tensors
    _require(kernels, tensors, kv_layout)
    hardware = lane.describe(hardware or capacities())
    config, hardware = _beside_disk(config, hardware, opened.spec, kv_layout)
    size = footprint(opened.spec, tensors, kv_layout)
    if uses := uses_of(opened, cache_folder)[1]:
        from penstock.memory import kept_uses

        size = kept_uses.learned(size, uses)
    if shares_ends:
        embedding, head = (UnitLayout.of(beside_shared(end)) for end in (tensors.embedding, tensors.head))
        size = replace(size, embedding_bytes=embedding.num_bytes, head_bytes=head.num_bytes)
    longest = context(size, config)
    activation_bytes = _measure_activations(opened, kernels, config, kv_layout, longest, lane)
    plan = plan_memory(size, hardware, config, activation_bytes)
    return PlannedModel(opened, kernels, config, kv_layout, lane, hardware, size, plan)


def _beside_disk(
    config: EngineConfig, hardware: HardwareProfile, spec: ModelSpec, kv_layout: KVLayout
) -> tuple[EngineConfig, HardwareProfile]:
    """A config and a machine with the host memory that the threads leave which write and read keys and values
    on disk, and those of a card on the host."""
    num_tiers = (config.kv_disk is not None) + (config.kv_host_bytes is not None)
    if not num_tiers:
        return config, hardware
    from penstock.cache.disk.kv_store import NUM_BUFFERS

    num_bytes = num_tiers * NUM_BUFFERS * round_up(config.block_size * spec.kv_bytes_per_token(kv_layout))
    if config.host_memory_bytes is not None:
        return replace(config, host_memory_bytes=max(1, config.host_memory_bytes - num_bytes)), hardware
    return config, replace(hardware, free_ram_bytes=max(0, hardware.free_ram_bytes - num_bytes))


def uses_of(opened: OpenModel, cache_folder: Path | None) -> tuple[Path | None, dict[UnitKey, float]]:
    """The file in which the uses of the model's experts are kept, and the uses. None without experts."""
    if cache_folder is None or not opened.spec.num_experts_per_token:
        return None, {}
    from penstock.memory import kept_uses

    file, units = kept_uses.path_of(cache_folder, opened.store.checkpoint.folder), opened.store.units
    # Another model may have been in the folder before.
    return file, {key: count for key, count in kept_uses.read(file).items() if key in units}


def _require(kernels: Kernels, tensors: ModelTensors, kv_layout: KVLayout) -> None:
    """Raises ConfigError if the kernels lack a format of the weights, or the layout of keys and values."""
    types = {kind for tensor in tensors.multiplied for kind in tensor.format.operand_types}
    kernels.traits.require(tensors.group_size, kv_layout, types)


def _kernels(
    config: EngineConfig, lane: Lane, cache_folder: Path | None, kernels: Kernels | None
) -> tuple[Kernels, EngineConfig]:
    """The kernels of a lane, and the config in which "auto" is decided. Raises ConfigError."""
    num_threads = threads_of(config, lane.torch_device.type == "cuda")
    kernels = kernels or choose_kernels(config, lane.torch_device, cache_folder)
    return kernels, replace(config, kernels=kernels.traits.name, device=lane.choice, num_threads=num_threads)


def _measure_activations(
    opened: OpenModel,
    kernels: Kernels,
    config: EngineConfig,
    kv_layout: KVLayout,
    longest: int,
    lane: Lane,
) -> int:
    """Bytes of activations in the largest step. `longest` is the longest sequence in tokens: kernels that
    gather keys and values take more memory for a longer sequence, and native kernels keep partial results of
    it."""
    num_past = min(longest, USUAL_TOKENS) // 2 if kernels.traits.gathers_keys else 0
    if longest > opened.spec.num_chosen_keys > 0:  # so that tokens choose
        num_past = max(num_past, min(opened.spec.num_chosen_keys, longest - 1))
    batch = largest_step(config, longest, num_past, opened.spec)
    num_positions = batch.scheduled[0].sequence.num_tokens + batch.scheduled[0].drafts.num_nodes
    key = (
        repr(opened.spec),
        opened.store.tensors,
        replace(config, host_memory_bytes=None),
        type(kernels),
        longest,
    )
    if (known := _measured.get(key)) is not None:
        return known
    without: Kernels = kernels.without_arithmetic(longest)
    if opened.spec.num_experts_per_token:
        without = ZeroProducts(without)
    try:
        with room_for(f"the largest step, of {batch.num_tokens} tokens", lane):
            beside = host_kernels(config) if lane.torch_device.type == "cuda" else None
            family = opened.family(opened.spec, without, num_positions, lane.torch_device, beside)
            found = measure_activations(family, opened.store.tensors, config, kv_layout, batch)
            if len(_measured) >= _MOST_MEASURED:
                del _measured[next(iter(_measured))]
            _measured[key] = found
            return found
    finally:
        lane.trim()  # on a GPU, the weights of the warm-up took real memory


@contextlib.contextmanager
def room_for(purpose: str, lane: Lane) -> Iterator[None]:
    """Raises CapacityError if a GPU has too little memory for what torch allocates."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(lane.torch_device)
        raise CapacityError(
            f"{lane.torch_device} has no room for {purpose}: {gib(free)} of {gib(total)} are free. End the "
            "processes that take the rest (nvidia-smi shows them), or lower --max-num-batched-tokens, "
            "--max-num-seqs or --max-model-len",
            "device",
        ) from error
