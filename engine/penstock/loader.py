"""From a model's name to the parts of an engine: files found and checked, memory planned and allocated,
reading begun. Also the one place that knows how to measure both memory and arithmetic."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from penstock.config import EngineConfig
from penstock.errors import CapacityError, ConfigError
from penstock.generation.block_manager import BlockManager
from penstock.generation.executor import Executor
from penstock.generation.scheduler import Scheduler
from penstock.kernels import Kernels, QuantizedTensor, choose_kernels
from penstock.memory.direct_io import DirectReader
from penstock.memory.hardware import (
    HardwareProfile,
    Measure,
    capacities,
    hardware_profile,
    num_physical_cores,
)
from penstock.memory.kv_cache import KVCache
from penstock.memory.plan import MemoryPlan, plan_memory
from penstock.memory.pools import MemoryPool
from penstock.memory.rates import measure_disk, memory_read_gbps
from penstock.model.registry import OpenModel, open_model
from penstock.model.shapes import footprint
from penstock.spec import ModelSpec
from penstock.text.tokenizer import Tokenizer
from penstock.weights.checkpoint import read_json
from penstock.weights.hub import find_model
from penstock.weights.readers import StoreReader
from penstock.weights.streamer import LayerStreamer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """The parts of an engine; resident layers may still be on their way."""

    spec: ModelSpec
    tokenizer: Tokenizer
    executor: Executor
    scheduler: Scheduler
    streamer: LayerStreamer
    plan: MemoryPlan
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
) -> LoadedModel:
    """Engine.load() says what the arguments are and what is raised."""
    num_threads = config.num_threads or num_physical_cores()
    folder = find_model(model, revision, offline)
    opened = open_model(folder, config.ignore_unexpected_tensors)
    tokenizer = tokenizer or Tokenizer.load(folder)
    kernels = choose_kernels(config, num_threads)
    config = replace(config, kernels=kernels.name)
    kv_dtype = torch.float16 if config.kv_dtype == "float16" else torch.float32
    size = footprint(opened.spec, opened.store.tensors, kv_dtype.itemsize)
    plan = plan_memory(size, hardware or capacities(), config)
    max_model_len = _max_model_len(opened.spec, config, plan)
    kv_pool = MemoryPool("KV cache", plan.kv_bytes)
    kv_cache = KVCache(opened.spec, plan.num_kv_blocks, config.block_size, kv_dtype, kv_pool)
    # Native kernels have threads of their own; torch's would only fight them for the cores, which they keep
    # busy for a while after each operation.
    torch.set_num_threads(1 if kernels.name == "native" else num_threads)
    streamer, executor = _begin_reading(opened, plan, kernels, kv_cache, max_model_len, hardware, num_threads)
    blocks = BlockManager(kv_cache.num_blocks, config.block_size)
    return LoadedModel(
        opened.spec,
        tokenizer,
        executor,
        Scheduler(blocks, config.max_num_seqs, config.max_num_batched_tokens),
        streamer,
        plan,
        config,
        max_model_len,
        _default_sampling(folder),
    )


def _begin_reading(
    opened: OpenModel,
    plan: MemoryPlan,
    kernels: Kernels,
    kv_cache: KVCache,
    max_model_len: int,
    hardware: HardwareProfile | None,
    num_threads: int,
) -> tuple[LayerStreamer, Executor]:
    """Embedding and head are there when this returns, layers are on their way."""
    store, disk = opened.store, hardware.disk if hardware else None
    direct = DirectReader(disk.block_bytes, disk.depth) if disk else None
    reader = StoreReader(store, num_threads, direct)
    slow = [i for i in range(store.num_layers) if i not in plan.resident and not reader.is_direct(i)]
    if slow:
        logger.warning(
            "%d of %d layers do not fit into memory, and %s is not laid out to be streamed: they are "
            "quantized again in each step. Convert it once (penstock convert MODEL OUT, or serve it with "
            "--convert-to OUT)",
            len(slow), store.num_layers, store.checkpoint.folder,
        )  # fmt: skip
    embedding = reader.read_resident(store.tensors.embedding)
    head = reader.read_resident(store.tensors.head)
    streamer = LayerStreamer(store, reader, plan.resident, plan.num_staging_slots)
    family = opened.family(opened.spec, kernels, max_model_len)
    return streamer, Executor(family, embedding, head, streamer, kv_cache)


def measure_hardware(
    folder: Path | None, cache: Path | None = None, is_forced: bool = False
) -> HardwareProfile:
    """This machine, and the disk under `folder`, with rates measured once and kept in the file `cache`."""
    measure = Measure(memory_read_gbps, _int8_gops, measure_disk)
    return hardware_profile(folder, measure, cache, is_forced)


def _int8_gops(num_threads: int) -> float:
    """What our own product reaches on a block of a large model, in 1e9 INT8 operations a second."""
    kernels = choose_kernels(EngineConfig(), num_threads)
    weight = QuantizedTensor(torch.ones(4096, 4096, dtype=torch.int8), torch.ones(4096))
    x = torch.randn(256, 4096)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        kernels.int8_linear(x, weight)
        times.append(time.perf_counter() - started)
    return 2 * 2 * 256 * 4096 * 4096 / min(times) / 1e9  # two rows of integers for each token


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
