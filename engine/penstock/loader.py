"""From a model's name to the parts of an engine: files found and checked, memory planned and allocated,
reading begun."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from penstock.config import EngineConfig
from penstock.errors import CapacityError, ConfigError
from penstock.generation.block_manager import BlockManager
from penstock.generation.executor import Executor
from penstock.generation.warm_up import largest_step, measure_activations
from penstock.kernels import Kernels, choose_kernels
from penstock.memory.cost import StepPrediction, predict_step
from penstock.memory.device import CudaDevice, find_device
from penstock.memory.direct_io import DirectReader, aligned_buffer
from penstock.memory.hardware import (
    HardwareProfile,
    capacities,
    num_physical_cores,
)
from penstock.memory.kv_cache import KVCache
from penstock.memory.plan import CUDA_CONTEXT_BYTES, USUAL_TOKENS, MemoryPlan, context, gib, plan_memory
from penstock.memory.pools import MemoryPool
from penstock.model.registry import OpenModel, open_model
from penstock.model.shapes import footprint
from penstock.spec import ModelSpec
from penstock.text.tokenizer import Tokenizer
from penstock.weights.checkpoint import read_json
from penstock.weights.hub import find_model
from penstock.weights.readers import StoreReader
from penstock.weights.store import LayerWeights
from penstock.weights.streamer import LayerStreamer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """The parts of an engine; resident layers may still be on their way."""

    spec: ModelSpec
    tokenizer: Tokenizer
    executor: Executor
    block_manager: BlockManager
    streamer: LayerStreamer
    plan: MemoryPlan
    #: (num_tokens, num_sampled) of a step -> how long it should take.
    predict: Callable[[int, int], StepPrediction]
    #: As asked for, with "auto" resolved.
    config: EngineConfig
    max_model_len: int
    default_sampling: dict[str, object]


def load_model(
    model: str | Path,
    config: EngineConfig,
    offline: bool,
    revision: str | None,
    tokenizer: Tokenizer | None,
    hardware: HardwareProfile | None,
    cache_folder: Path | None,
) -> LoadedModel:
    """Engine.load() says what the arguments are and what is raised."""
    num_threads = config.num_threads or num_physical_cores()
    folder = find_model(model, revision, offline)
    with contextlib.ExitStack() as undo:
        opened = open_model(folder, config.ignore_unexpected_tensors, config.group_size)
        undo.callback(opened.store.close)
        ends = opened.store.checkpoint.config.get("eos_token_id") if folder.is_file() else None
        tokenizer = tokenizer or Tokenizer.load(folder, frozenset(ends or ()))
        device = find_device(config.device)
        if device is not None:
            undo.callback(device.close)
            if opened.store.tensors.group_size:
                raise ConfigError(
                    "scales per group of inputs are computed on the processor only, so far: pass --device "
                    "cpu, or take a model with scales per output channel"
                )
        torch_device = device.torch_device if device else None
        kernels = choose_kernels(config, num_threads, torch_device, cache_folder)
        # Native kernels have threads of their own, or are a GPU's; torch's would only fight for the cores,
        # which they keep busy for a while after each operation.
        torch.set_num_threads(1 if kernels.name == "native" else num_threads)
        config = replace(config, kernels=kernels.name, device="cuda" if device else "cpu")
        hardware = hardware or capacities()
        if device is not None and hardware.device is None:
            hardware = replace(hardware, device=device.profile())
        size = footprint(opened.spec, opened.store.tensors, _kv_dtype(config).itemsize)
        activation_bytes = _measure_activations(opened, kernels, config, context(size, config), torch_device)
        plan = plan_memory(size, hardware, config, activation_bytes)
        max_model_len = _max_model_len(opened.spec, config, plan)
        direct = DirectReader(hardware.disk.block_bytes, hardware.disk.depth) if hardware.disk else None
        reader = StoreReader(opened.store, num_threads, direct)
        undo.callback(reader.close)
        executor, streamer = _begin_reading(opened, reader, plan, config, kernels, max_model_len, device)
        undo.callback(streamer.close)
        _compare(plan, reader, streamer, config)
        undo.pop_all()
    return LoadedModel(
        opened.spec,
        tokenizer,
        executor,
        BlockManager(plan.num_kv_blocks, config.block_size, config.enable_prefix_caching),
        streamer,
        plan,
        functools.partial(predict_step, plan, size, hardware, config),
        config,
        max_model_len,
        _default_sampling(folder),
    )


def _kv_dtype(config: EngineConfig) -> torch.dtype:
    return torch.float16 if config.kv_dtype == "float16" else torch.float32


def _measure_activations(
    opened: OpenModel, kernels: Kernels, config: EngineConfig, longest: int, device: torch.device | None
) -> int:
    """Bytes of the largest step. `longest` is the longest sequence: kernels that gather keys and values take
    more for a longer one, and native ones keep partial results of it."""
    num_past = 0 if kernels.name == "native" else min(longest, USUAL_TOKENS) // 2
    batch = largest_step(config, longest, num_past)
    num_positions = batch.scheduled[0].sequence.num_tokens
    family = opened.family(opened.spec, kernels.without_arithmetic(longest), num_positions, device)
    num_bytes = measure_activations(family, opened.store.tensors, config, batch)
    if device is not None:
        torch.cuda.empty_cache()  # the weights of the warm-up were real
    return num_bytes


def _allocate_kv(
    spec: ModelSpec, plan: MemoryPlan, config: EngineConfig, device: CudaDevice | None
) -> KVCache:
    pool = MemoryPool("KV cache", plan.kv_bytes, device.allocate if device else aligned_buffer)
    return KVCache(spec, plan.num_kv_blocks, config.block_size, _kv_dtype(config), pool)


def _begin_reading(
    opened: OpenModel,
    reader: StoreReader,
    plan: MemoryPlan,
    config: EngineConfig,
    kernels: Kernels,
    max_model_len: int,
    device: CudaDevice | None,
) -> tuple[Executor, LayerStreamer]:
    """Embedding and head are there when this returns, layers are on their way: whatever takes the processor
    is done while they arrive."""
    tensors = opened.store.tensors
    embedding_there, head_there = reader.begin(tensors.embedding), reader.begin(tensors.head)
    if device is not None:
        device.limit(plan.device_budget_bytes - CUDA_CONTEXT_BYTES)
    streamer = LayerStreamer(
        opened.store,
        reader,
        plan.resident,
        plan.num_staging_slots,
        device,
        plan.at_home("host") if device else frozenset(),
        plan.num_host_slots,
    )
    try:
        family = opened.family(opened.spec, kernels, max_model_len, streamer.torch_device)
        kv_cache = _allocate_kv(opened.spec, plan, config, device)
        embedding, head = embedding_there(), head_there()
        tied = None
        if device is not None:
            if "head" not in head:
                tied = LayerWeights({"embedding": embedding.matrix("embedding")}).to(device.torch_device)
            head = head.to(device.torch_device)
    except BaseException:
        streamer.close()
        raise
    return Executor(family, embedding, head, streamer, kv_cache, tied, config.max_num_seqs), streamer


def _compare(plan: MemoryPlan, reader: StoreReader, streamer: LayerStreamer, config: EngineConfig) -> None:
    """Say loudly what can't be as it was planned. Raises CapacityError, if the config wants it exactly so."""
    streamed = [index for index in range(len(plan.layers)) if index not in plan.resident]
    found = [*plan.warnings, *reader.detours(streamed)]
    if streamer.unpinned_bytes:
        found.append(
            f"the system refused to pin {gib(streamer.unpinned_bytes)} of {gib(plan.layer_bytes('host'))}: "
            "copies out of them are slower. Raise the limit of locked memory (ulimit -l, docker --ulimit "
            "memlock=-1), or lower --host-memory"
        )
    for text in found:
        logger.warning("%s", text)
    if found and config.strict_plan:
        raise CapacityError(f"refused because of --strict-plan: {'; '.join(found)}")


def _max_model_len(spec: ModelSpec, config: EngineConfig, plan: MemoryPlan) -> int:
    """The longest sequence that model, config and KV cache allow. Raises CapacityError and ConfigError."""
    context, capacity = config.max_model_len or spec.max_position_embeddings, plan.num_kv_tokens
    if context > spec.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {context}; the model was made for {spec.max_position_embeddings} positions"
        )
    if capacity < 2 or (config.max_model_len is not None and capacity < context):
        raise CapacityError(
            f"{plan.kv_bytes} bytes of KV cache hold {capacity} tokens; a sequence of {context} tokens needs "
            "more. Give it more (--kv-tokens, --kv-cache-memory) or ask for less (--max-model-len)"
        )
    if capacity < context:
        logger.warning(
            "the model's context of %d tokens is cut to %d: that is what %d bytes of KV cache hold",
            context, capacity, plan.kv_bytes,
        )  # fmt: skip
    return min(context, capacity)


def _default_sampling(folder: Path) -> dict[str, object]:
    """generation_config.json's sampling parameters; {} where there is no such file. As in vLLM they are taken
    by name, and transformers' do_sample decides nothing: without a temperature it is 1."""
    path = folder / "generation_config.json"
    advice = read_json(path) if path.is_file() else {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {name: advice[name] for name in names if advice.get(name) is not None}
