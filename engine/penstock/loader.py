"""From a model's name to the parts of an engine: files found and checked, memory planned and allocated,
reading begun."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.config import EngineConfig, ResolvedConfig
from penstock.errors import CapacityError, ConfigError
from penstock.generation.executor import Executor
from penstock.generation.warm_up import ZeroProducts, largest_step, measure_activations
from penstock.kernels import Kernels, Matrix, choose_kernels
from penstock.memory import kept_uses
from penstock.memory.direct_io import DEFAULT_DEPTH, DirectReader
from penstock.memory.hardware import (
    HardwareProfile,
    capacities,
    num_physical_cores,
)
from penstock.memory.kv_disk.kv_store import NUM_BUFFERS
from penstock.memory.kv_spill.planned_cache import planned_cache
from penstock.memory.kv_spill.spilled_cache import SpilledKVCache
from penstock.memory.lane import Lane, find_lane
from penstock.memory.pages import round_up
from penstock.memory.planning.cost import Predict, predict_step
from penstock.memory.planning.experts.expert_lanes import expert_rates
from penstock.memory.planning.kv_blocks import USUAL_TOKENS, context
from penstock.memory.planning.plan import CUDA_CONTEXT_BYTES, MemoryPlan, gib
from penstock.memory.planning.planner import plan_memory
from penstock.memory.spare_memory import SpareMemory
from penstock.model.pooling.find_pooling import wish_of
from penstock.model.pooling.pooling_config import pooling_config
from penstock.model.pooling.pooling_spec import PoolingSpec
from penstock.model.registry import OpenModel, open_model
from penstock.model.shapes import footprint
from penstock.model.through_transformers.family import ThroughTransformers
from penstock.spec import KVLayout, ModelFootprint, ModelSpec, UnitKey
from penstock.text.tokenizer import Tokenizer
from penstock.weights.adapters.loaded_adapters import with_adapter_bytes
from penstock.weights.checkpoints.checkpoint import read_json
from penstock.weights.checkpoints.checksums import Checksums
from penstock.weights.checkpoints.hub import find_model
from penstock.weights.layer_weights import with_head
from penstock.weights.split.sharing import Sharing, streamed_share
from penstock.weights.store import WeightStore
from penstock.weights.streamer import LayerStreamer
from penstock.weights.tensors import ModelTensors, UnitLayout, beside_shared
from penstock.weights.tiers.readers import StoreReader
from penstock.weights.tiers.use_counts import UseCounts

logger = logging.getLogger(__name__)

#: Bytes of activations, by all that they depend on: a model that comes back does not compute its largest step
#: again.
_measured: dict[tuple[object, ...], int] = {}


@dataclass(frozen=True)
class Model:
    """A model that is ready to compute: its code, its weights in all memories, its keys and values. Resident
    layers may still be on their way into memory."""

    spec: ModelSpec
    tokenizer: Tokenizer
    store: WeightStore
    streamer: LayerStreamer
    executor: Executor
    #: The longest sequence that model, config and KV cache allow.
    max_model_len: int
    #: The KV cache has room for fewer tokens than the model's context, so that max_model_len is less.
    is_context_cut: bool
    #: A request gets the same bits in any company.
    is_invariant: bool
    #: The model's own advice (generation_config.json), for whoever builds SamplingParams.
    default_sampling: dict[str, object]
    #: Where the uses of experts are kept, if they are.
    uses_file: Path | None = None

    @property
    def pooling(self) -> PoolingSpec | None:
        """How it makes vectors or scores; None for a model that writes."""
        return self.executor.family.pooling

    def close(self) -> None:
        """Stop reading, close the files, and give back a GPU's memory and what was pinned. The host's memory
        is freed when this object and all views of its weights are gone. Keeps the uses of experts."""
        experts = self.streamer.tiers.nearest_experts
        if experts is not None and self.uses_file is not None and experts.uses.num_uses:
            kept_uses.write(self.uses_file, experts.uses.counts)
        self.streamer.close()
        if isinstance(self.executor.kv_cache, SpilledKVCache):
            self.executor.kv_cache.close()
        self.store.close()


#: Says which part of a model this machine computes, and by what config, from the model, the config for all of
#: it, the lane and what the machine has. If it raises, it closes the lane.
Share = Callable[[OpenModel, EngineConfig, Lane, HardwareProfile | None], tuple[OpenModel, EngineConfig]]


@dataclass(frozen=True)
class LoadedModel:
    """The parts of an engine."""

    model: Model
    plan: MemoryPlan
    config: ResolvedConfig
    #: (num_tokens, num_sampled) of a step -> how long it should take.
    predict: Predict


def load_model(
    model: str | Path,
    config: EngineConfig,
    offline: bool,
    revision: str | None,
    tokenizer: Tokenizer | None,
    hardware: HardwareProfile | None,
    cache_folder: Path | None,
    spare: SpareMemory | None = None,
    share: Share | None = None,
) -> LoadedModel:
    """Load a model by its name. Engine.load() describes the arguments and the errors. The tokenizer is made
    while weights are read. `share` says which layers are this machine's."""
    config = with_adapter_bytes(config)
    folder = find_model(model, revision, offline, allow_pickle=config.allow_pickle)
    opened = open_folder(folder, config)
    try:
        found = tokenizer or begin_tokenizer(folder, opened)
        advice = _default_sampling(folder)  # read before there is a lane, which would have to be closed
        lane = find_lane(config.device, spare)
        if share is not None:
            opened, config = share(opened, config, lane, hardware)
        return assemble(opened, found, config, lane, hardware, cache_folder, advice)
    except BaseException:
        opened.store.close()
        raise


def open_folder(folder: Path, config: EngineConfig) -> OpenModel:
    """Open a model's files as the config says. Raises what open_model() raises."""
    opened = open_model(
        folder,
        config.ignore_unexpected_tensors,
        config.group_size,
        config.allow_pickle,
        config.weights,
        model_impl=config.model_impl,
        wish=wish_of(config),
    )
    if files := opened.store.checkpoint.pickles:
        Checksums(files, is_logged=True)
    return opened


def begin_tokenizer(folder: Path, opened: OpenModel) -> Future[Tokenizer]:
    """The tokenizer of a folder or file, which a thread makes."""
    ends = opened.store.checkpoint.config.get("eos_token_id") if folder.is_file() else None
    making = ThreadPoolExecutor(1, "penstock-tokenizer")
    found = making.submit(Tokenizer.load, folder, frozenset(ends or ()))
    making.shutdown(wait=False)
    return found


class SharedEnds(NamedTuple):
    """Matrices of a model in memory that a second model has, too. The head's lies where both compute. Without
    a head, that is its own."""

    embedding: Matrix
    head: Matrix | None = None


class PlannedModel(NamedTuple):
    """A model whose files are open, and for which nothing is allocated yet."""

    opened: OpenModel
    kernels: Kernels
    #: "auto" is decided for kernels, device and threads.
    config: EngineConfig
    kv_layout: KVLayout
    lane: Lane
    hardware: HardwareProfile
    size: ModelFootprint
    plan: MemoryPlan


def plan_model(
    opened: OpenModel,
    config: EngineConfig,
    lane: Lane,
    hardware: HardwareProfile | None = None,
    cache_folder: Path | None = None,
    kernels: Kernels | None = None,
    kv_layout: KVLayout | None = None,
    shares_ends: bool = False,
) -> PlannedModel:
    """Plan the memory. `kernels` and `kv_layout` replace those that the config asks for. `shares_ends`: the
    matrices of embedding and head will be another model's. Raises ConfigError and CapacityError."""
    if config.kernels in ("auto", "native") and lane.choice == "cpu" and hardware and hardware.kernels:
        config = replace(config, kernel_tuning=config.kernel_tuning or hardware.kernels.tuning)
    kernels, config = _kernels(config, lane, cache_folder, kernels)
    if opened.pooling is not None:
        config = pooling_config(config, opened.spec, opened.pooling)
    kv_layout = kv_layout or opened.spec.kv_layout(config.kv_dtype)
    tensors = opened.store.tensors
    _require(kernels, opened.spec, tensors, kv_layout)
    hardware = lane.describe(hardware or capacities())
    config, hardware = _beside_disk(config, hardware, opened.spec, kv_layout)
    size = kept_uses.learned(footprint(opened.spec, tensors, kv_layout), _kept_uses(opened, cache_folder)[1])
    if shares_ends:
        embedding, head = (UnitLayout.of(beside_shared(end)) for end in (tensors.embedding, tensors.head))
        size = replace(size, embedding_bytes=embedding.num_bytes, head_bytes=head.num_bytes)
    longest = context(size, config)
    activation_bytes = _measure_activations(opened, kernels, config, kv_layout, longest, lane)
    plan = plan_memory(size, hardware, config, activation_bytes)
    return PlannedModel(opened, kernels, config, kv_layout, lane, hardware, size, plan)


def assemble(
    opened: OpenModel,
    tokenizer: Tokenizer | Future[Tokenizer],
    config: EngineConfig,
    lane: Lane,
    hardware: HardwareProfile | None = None,
    cache_folder: Path | None = None,
    default_sampling: dict[str, object] | None = None,
    kernels: Kernels | None = None,
    kv_layout: KVLayout | None = None,
) -> LoadedModel:
    """Plan the memory for a model whose files are open, as plan_model() does, allocate the memory and begin
    to read. If assemble() raises, the lane is closed; the store stays open."""
    with contextlib.ExitStack() as undo:
        undo.callback(lane.close)
        planned = plan_model(opened, config, lane, hardware, cache_folder, kernels, kv_layout)
        undo.pop_all()
    return begin_reading(planned, tokenizer, cache_folder, default_sampling)


def begin_reading(
    planned: PlannedModel,
    tokenizer: Tokenizer | Future[Tokenizer],
    cache_folder: Path | None = None,
    default_sampling: dict[str, object] | None = None,
    shared: SharedEnds | None = None,
) -> LoadedModel:
    """Allocate the memory as it is planned, and begin to read. `shared`: the matrices of a model that
    plan_model() was told of. If begin_reading() raises, the lane is closed; the store stays open."""
    opened, kernels, config, kv_layout, lane, hardware, size, plan = planned
    with contextlib.ExitStack() as undo:
        undo.callback(lane.close)
        uses_file, uses = _kept_uses(opened, cache_folder)
        max_model_len = _max_model_len(opened.spec, config, plan)
        if plan.num_state_sequences:
            config = replace(config, max_num_seqs=min(config.max_num_seqs, plan.num_state_sequences))
        resolved = ResolvedConfig.of(config, max_model_len)
        direct = DirectReader(hardware.disk.block_bytes, hardware.disk.depth) if hardware.disk else None
        reader = StoreReader(opened.store, resolved.num_threads, direct, lane.allocate_end)
        undo.callback(reader.close)
        share_of = streamed_share(plan, size, hardware, resolved)
        rates = expert_rates(size.experts, hardware, resolved.rows_per_token)
        sharing = Sharing.of(plan, opened.store.tensors, reader, kernels, lane, resolved, share_of, rates)
        undo.callback(sharing.reader.close)
        executor, streamer = _begin_reading(
            opened,
            reader,
            sharing,
            plan,
            resolved,
            kv_layout,
            lane,
            UseCounts(size.experts.count_per_token, uses),
            undo,
            shared,
            hardware.disk.depth if hardware.disk else DEFAULT_DEPTH,
        )
        _compare(plan, reader, streamer, resolved)
        family = executor.family
        # Our own families promise the same bits in any company, and tests show it.
        is_invariant = not isinstance(family, ThroughTransformers) or family.is_invariant(
            opened.store.tensors, kv_layout
        )
        if isinstance(tokenizer, Future):
            tokenizer = tokenizer.result()  # it was made while weights are read
        undo.pop_all()
    _tell_who_computes(opened.spec, is_invariant)
    is_context_cut = config.max_model_len is None and max_model_len < opened.spec.max_position_embeddings
    model = Model(
        opened.spec,
        tokenizer,
        opened.store,
        streamer,
        executor,
        max_model_len,
        is_context_cut,
        is_invariant,
        default_sampling or {},
        uses_file,
    )
    return LoadedModel(model, plan, resolved, _predict(plan, size, hardware, resolved))


def _beside_disk(
    config: EngineConfig, hardware: HardwareProfile, spec: ModelSpec, kv_layout: KVLayout
) -> tuple[EngineConfig, HardwareProfile]:
    """A config and a machine with the host memory that the threads leave which write and read keys and values
    on disk, and those of a card on the host."""
    num_tiers = (config.kv_disk is not None) + (config.kv_host_bytes is not None)
    if not num_tiers:
        return config, hardware
    num_bytes = num_tiers * NUM_BUFFERS * round_up(config.block_size * spec.kv_bytes_per_token(kv_layout))
    if config.host_memory_bytes is not None:
        return replace(config, host_memory_bytes=max(1, config.host_memory_bytes - num_bytes)), hardware
    return config, replace(hardware, free_ram_bytes=max(0, hardware.free_ram_bytes - num_bytes))


def _tell_who_computes(spec: ModelSpec, is_invariant: bool) -> None:
    """Log that layers are computed by other people's code."""
    if spec.implementation != "transformers":
        return
    logger.info("the layers of %s are computed by transformers' modules", spec.architecture)
    if not is_invariant:
        logger.warning(
            "%s is not batch invariant: what other requests compute at the same time may change the last "
            "bits of a request's numbers, and so a token now and then",
            spec.architecture,
        )  # fmt: skip


def _kept_uses(opened: OpenModel, cache_folder: Path | None) -> tuple[Path | None, dict[UnitKey, float]]:
    """The file in which the uses of the model's experts are kept, and the uses. None without experts."""
    if cache_folder is None or not opened.spec.num_experts_per_token:
        return None, {}
    file, units = kept_uses.path_of(cache_folder, opened.store.checkpoint.folder), opened.store.units
    # Another model may have been in the folder before.
    return file, {key: count for key, count in kept_uses.read(file).items() if key in units}


def _require(kernels: Kernels, spec: ModelSpec, tensors: ModelTensors, kv_layout: KVLayout) -> None:
    """Raises ConfigError if the kernels lack a format of the weights, the layout of keys and values, or
    recurrent states."""
    kernels.traits.require_recurrence(spec.state_bytes)
    types = {kind for tensor in tensors.multiplied for kind in tensor.format.operand_types}
    kernels.traits.require(tensors.group_size, kv_layout, types)


def _predict(
    plan: MemoryPlan, size: ModelFootprint, hardware: HardwareProfile, config: ResolvedConfig
) -> Predict:
    """Steps repeat each other in size, and a prediction takes as long as a few kernels of a small model."""
    return functools.lru_cache(maxsize=4096)(functools.partial(predict_step, plan, size, hardware, config))


def _kernels(
    config: EngineConfig, lane: Lane, cache_folder: Path | None, kernels: Kernels | None
) -> tuple[Kernels, EngineConfig]:
    """The kernels of a lane, and the config in which "auto" is decided. Raises ConfigError."""
    num_threads = config.num_threads or num_physical_cores()
    kernels = kernels or choose_kernels(config, num_threads, lane.torch_device, cache_folder)
    torch.set_num_threads(1 if kernels.traits.has_own_threads else num_threads)
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
    batch = largest_step(config, longest, num_past, opened.spec)
    num_positions = batch.scheduled[0].sequence.num_tokens
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
        with _room_for(f"the largest step, of {batch.num_tokens} tokens", lane):
            family = opened.family(opened.spec, without, num_positions, lane.torch_device)
            _measured[key] = measure_activations(family, opened.store.tensors, config, kv_layout, batch)
            return _measured[key]
    finally:
        lane.trim()  # on a GPU, the weights of the warm-up took real memory


@contextlib.contextmanager
def _room_for(purpose: str, lane: Lane) -> Iterator[None]:
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


def _begin_reading(
    opened: OpenModel,
    reader: StoreReader,
    sharing: Sharing,
    plan: MemoryPlan,
    config: ResolvedConfig,
    kv_layout: KVLayout,
    lane: Lane,
    uses: UseCounts[UnitKey],
    undo: contextlib.ExitStack,
    shared: SharedEnds | None,
    depth: int,
) -> tuple[Executor, LayerStreamer]:
    """Allocate memory and begin to read. When _begin_reading() returns, embedding and head are in memory and
    layers are on their way; all work of the processor is done while they arrive."""
    spec, tensors = opened.spec, opened.store.tensors
    ends = (tensors.embedding, tensors.head)
    has_head = shared is None or shared.head is None
    embedding_there, head_there = map(reader.begin, ends if has_head else map(beside_shared, ends))
    lane.limit(plan.device_budget_bytes - CUDA_CONTEXT_BYTES)
    streamer = LayerStreamer(
        sharing.tensors, sharing.reader, lane, plan.tiers, uses, sharing.rows, sharing.expert_rates
    )
    undo.callback(streamer.close)
    with _room_for("the tables of its positions", lane):
        family = opened.family(spec, sharing.kernels, config.max_model_len, lane.torch_device)
    kv_cache = planned_cache(spec, plan, config.spill_folder, kv_layout, lane, depth)
    if isinstance(kv_cache, SpilledKVCache):
        undo.callback(kv_cache.close)
    embedding = embedding_there()
    if shared is not None:
        embedding = embedding.joined("embedding", shared.embedding)
    if shared is not None and shared.head is not None:
        head = head_there().map(lane.upload).joined("head", shared.head)
    else:
        head = with_head(tensors, head_there(), embedding).map(lane.upload)
    places = tensors.places
    return Executor(family, embedding, head, streamer, kv_cache, config.max_num_seqs, places), streamer


def _compare(plan: MemoryPlan, reader: StoreReader, streamer: LayerStreamer, config: ResolvedConfig) -> None:
    """Warn of everything that can't be as it was planned. Raises CapacityError if the config has
    strict_plan."""
    # Layers that wait on the disk are read in each sweep; pinned layers are read once.
    again = plan.at_home("disk")
    found = [*plan.warnings, *reader.detours(streamer.keys_of(again))]
    if unpinned_bytes := streamer.tiers.unpinned_bytes:
        found.append(
            f"the system refused to pin {gib(unpinned_bytes)} of "
            f"{gib(plan.layer_bytes('host') + plan.kv_spill_bytes)}: copies out of them are slower. Raise "
            "the limit of locked memory (ulimit -l, docker --ulimit memlock=-1), or lower --host-memory or "
            "--kv-spill-memory"
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
    elsewhere = "in RAM (--kv-spill-memory)" if plan.has_gpu else "on disk (--kv-spill)"
    if capacity < 2 or (config.max_model_len is not None and capacity < context):
        raise CapacityError(
            f"{plan.kv_bytes} bytes of KV cache hold {capacity} tokens; a sequence of {context} tokens needs "
            f"more. Enlarge the cache (--kv-tokens, --kv-cache-memory), let the rest lie {elsewhere}, or ask "
            "for less (--max-model-len)"
        )
    if capacity < context:
        logger.warning(
            "the model's context of %d tokens is cut to %d: that is what %d bytes of KV cache hold",
            context, capacity, plan.kv_bytes,
        )  # fmt: skip
    return min(context, capacity)


def _default_sampling(folder: Path) -> dict[str, object]:
    """The sampling parameters of generation_config.json; {} if there is no such file. As in vLLM, do_sample
    is not looked at: a file without a temperature means the default temperature of 1."""
    path = folder / "generation_config.json"
    advice = read_json(path) if path.is_file() else {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size")
    return {name: advice[name] for name in names if advice.get(name) is not None}
