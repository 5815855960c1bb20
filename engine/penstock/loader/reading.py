"""begin_reading(): memory is allocated as it was planned, and weights are on their way into it."""

from __future__ import annotations

import contextlib
import functools
import logging
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from penstock.config import INT8_ACTIVATIONS_COST, EngineConfig, ResolvedConfig
from penstock.errors import CapacityError
from penstock.generation.executor import Executor
from penstock.kernels import Kernels, attending_in_ram
from penstock.loader.parts import LoadedModel, Model, PlannedModel, SharedEnds
from penstock.loader.planning import room_for, uses_of
from penstock.memory.direct_io import DEFAULT_DEPTH, DirectReader
from penstock.memory.hardware import HardwareProfile
from penstock.memory.kv_spill.planned_cache import planned_cache
from penstock.memory.kv_spill.spilled_cache import SpilledKVCache
from penstock.memory.lane import Lane
from penstock.memory.planning.cost import Predict, predict_step
from penstock.memory.planning.experts.expert_lanes import expert_rates
from penstock.memory.planning.kv_blocks import check_context
from penstock.memory.planning.plan import CUDA_CONTEXT_BYTES, MemoryPlan, gib
from penstock.model.registry import OpenModel
from penstock.model.through_transformers.family import ThroughTransformers
from penstock.spec import KVLayout, ModelFootprint, ModelSpec, UnitKey
from penstock.text.tokenizer import Tokenizer
from penstock.weights.layer_weights import with_head
from penstock.weights.split.sharing import Sharing, host_kernels, streamed_share
from penstock.weights.streamer import LayerStreamer
from penstock.weights.tensors import beside_shared
from penstock.weights.tiers.readers import StoreReader
from penstock.weights.tiers.use_counts import UseCounts

logger = logging.getLogger(__name__)


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
        uses_file, uses = uses_of(opened, cache_folder)
        max_model_len = _max_model_len(opened.spec, config, plan)
        if plan.num_state_sequences:
            config = replace(config, max_num_seqs=min(config.max_num_seqs, plan.num_state_sequences))
        resolved = ResolvedConfig.of(config, max_model_len)
        direct = DirectReader(hardware.disk.block_bytes, hardware.disk.depth) if hardware.disk else None
        reader = StoreReader(opened.store, resolved.num_threads, direct, lane.allocate_end)
        undo.callback(reader.close)
        share_of = streamed_share(plan, size, hardware, resolved)
        rates = expert_rates(size.experts, hardware, resolved.rows_per_token)
        kernels, plan = _beside_ram(kernels, plan, resolved, lane)
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
            hardware,
        )
        _compare(plan, reader, streamer, resolved)
        is_invariant = _is_invariant(opened, executor, kv_layout)
        if isinstance(tokenizer, Future):
            tokenizer = tokenizer.result()  # it was made while weights are read
        undo.pop_all()
    _tell_who_computes(opened.spec, is_invariant)
    _tell_of_activations(resolved)
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


def _is_invariant(opened: OpenModel, executor: Executor, kv_layout: KVLayout) -> bool:
    """Whether a request gets the same bits in any company. Our own families promise it, and tests show it."""
    family = executor.family
    return not isinstance(family, ThroughTransformers) or family.is_invariant(opened.store.tensors, kv_layout)


def _beside_ram(
    kernels: Kernels, plan: MemoryPlan, config: ResolvedConfig, lane: Lane
) -> tuple[Kernels, MemoryPlan]:
    """A card's kernels that leave keys and values in RAM to the processor as it is planned, or the plan
    without that."""
    if plan.attends_in_ram is None:
        return kernels, plan
    beside = attending_in_ram(kernels, host_kernels(config), lane.handover)
    if beside is kernels:
        logger.warning(
            "the card attends alone to keys and values in RAM: this needs compiled kernels of the processor "
            "and our own kernels on the card"
        )
        plan = replace(plan, attends_in_ram=None)
    return beside, plan


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


def _tell_of_activations(config: ResolvedConfig) -> None:
    """Warn of activations that are rounded by one scale for a token, which an outlier makes coarse."""
    if config.activations == "int8":
        logger.warning(
            "activations are rounded to 8 bits with one scale for each token: answers are further from the "
            "model's than with int16, the default (SmolLM2-135M: %s)",
            INT8_ACTIVATIONS_COST,
        )


def _predict(
    plan: MemoryPlan, size: ModelFootprint, hardware: HardwareProfile, config: ResolvedConfig
) -> Predict:
    """Steps repeat each other in size, and a prediction takes as long as a few kernels of a small model."""
    return functools.lru_cache(maxsize=4096)(functools.partial(predict_step, plan, size, hardware, config))


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
    hardware: HardwareProfile,
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
    with room_for("the tables of its positions", lane):
        beside = host_kernels(config) if lane.torch_device.type == "cuda" else None
        family = opened.family(spec, sharing.kernels, config.max_model_len, lane.torch_device, beside)
    assert spec.biases_scores or not any(each.has_biases for each in family.attentions)
    depth = hardware.disk.depth if hardware.disk else DEFAULT_DEPTH
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
    executor = Executor(
        family,
        embedding,
        head,
        streamer,
        kv_cache,
        config.max_num_seqs,
        tensors.places,
        lane.inlet(getattr(sharing.kernels, "fetch", None)),
        plan.attends_in_ram,
    )
    return executor, streamer


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
    check_context(config, spec.max_position_embeddings)
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
