"""begin_reading(): memory is allocated as it was planned, and weights are on their way into it."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cache.kv_cache import KVCache
from penstock.config import INT8_ACTIVATIONS_COST, EngineConfig, ResolvedConfig
from penstock.errors import CapacityError
from penstock.generation.executor import Executor
from penstock.kernels import Kernels, host_kernels
from penstock.loader.parts import LoadedModel, Model, PlannedModel, SharedEnds
from penstock.loader.planned_cache import planned_cache
from penstock.loader.planning import room_for, uses_of
from penstock.memory.direct_io import DEFAULT_DEPTH, DirectReader
from penstock.memory.planning.cost import Predict, predict_step
from penstock.memory.planning.kv_blocks import check_context
from penstock.memory.planning.plan import CUDA_CONTEXT_BYTES, MemoryPlan, gib
from penstock.model.family import Family
from penstock.spec import ModelSpec, UnitKey
from penstock.text.tokenizer import Tokenizer
from penstock.weights.layer_weights import LayerWeights, with_head
from penstock.weights.streamer import LayerStreamer
from penstock.weights.tensors import beside_shared
from penstock.weights.tiers.readers import StoreReader
from penstock.weights.tiers.use_counts import UseCounts

if TYPE_CHECKING:
    from penstock.cache.spill.spilled_cache import SpilledKVCache
    from penstock.memory.planning.expert_lanes import ExpertRates
    from penstock.weights.split.sharing import Sharing

logger = logging.getLogger(__name__)


def begin_reading(
    planned: PlannedModel,
    tokenizer: Tokenizer | Future[Tokenizer],
    cache_folder: Path | None = None,
    default_sampling: dict[str, object] | None = None,
    shared: SharedEnds | None = None,
) -> LoadedModel:
    """Allocate the memory as it is planned, and begin to read. `shared`: the matrices of a model that
    plan_model() was told of. If begin_reading() raises, the lane is closed; the store stays open.

    When begin_reading() returns, embedding and head are in memory and layers are on their way; all work of
    the processor is done while they arrive."""
    opened, lane, spec = planned.opened, planned.lane, planned.opened.spec
    with contextlib.ExitStack() as undo:
        undo.callback(lane.close)
        uses_file, uses = uses_of(opened, cache_folder)
        max_model_len = _max_model_len(spec, planned.config, planned.plan)
        config = ResolvedConfig.of(_with_room_for_states(planned), max_model_len)
        reader = _open_reader(planned, config, undo)
        planned = _attending_in_ram(planned, config)
        sharing = _share_products(planned, config, reader, undo)
        wait_for_ends = _begin_ends(planned, reader, shared)
        streamer = _begin_layers(planned, sharing, uses, undo)
        family = _make_family(planned, config, sharing.kernels)
        kv_cache = _allocate_cache(planned, config, undo)
        executor = Executor(
            family,
            *wait_for_ends(),
            streamer,
            kv_cache,
            max_rows=config.max_num_seqs,
            places=opened.store.tensors.places,
            inlet=lane.inlet(getattr(sharing.kernels, "fetch", None)),
            attends_in_ram=planned.plan.attends_in_ram,
        )
        _compare(planned.plan, reader, streamer, config)
        is_invariant = family.is_invariant(opened.store.tensors, planned.kv_layout)
        if isinstance(tokenizer, Future):
            tokenizer = tokenizer.result()  # it was made while weights are read
        undo.pop_all()
    _tell_who_computes(spec, is_invariant)
    _tell_of_activations(config)
    model = Model(
        spec,
        tokenizer,
        opened.store,
        streamer,
        executor,
        max_model_len=max_model_len,
        is_context_cut=planned.config.max_model_len is None and max_model_len < spec.max_position_embeddings,
        is_invariant=is_invariant,
        default_sampling=default_sampling or {},
        uses_file=uses_file,
    )
    return LoadedModel(model, planned.plan, config, _predict(planned, config))


def _with_room_for_states(planned: PlannedModel) -> EngineConfig:
    """No step has more sequences than there is room for recurrent states."""
    config, most = planned.config, planned.plan.num_state_sequences
    return replace(config, max_num_seqs=min(config.max_num_seqs, most)) if most else config


def _open_reader(planned: PlannedModel, config: ResolvedConfig, undo: contextlib.ExitStack) -> StoreReader:
    disk = planned.hardware.disk
    direct = DirectReader(disk.block_bytes, disk.depth) if disk else None
    reader = StoreReader(planned.opened.store, config.num_threads, direct, planned.lane.allocate_end)
    undo.callback(reader.close)
    return reader


def _attending_in_ram(planned: PlannedModel, config: ResolvedConfig) -> PlannedModel:
    """With a card's kernels that leave keys and values in RAM to the processor as it is planned, or with a
    plan without that."""
    if planned.plan.attends_in_ram is None:
        return planned
    from penstock.kernels.on_a_card import attending_in_ram

    kernels = attending_in_ram(planned.kernels, host_kernels(config), planned.lane.handover)
    if kernels is not planned.kernels:
        return planned._replace(kernels=kernels)
    logger.warning(
        "the card attends alone to keys and values in RAM: this needs compiled kernels of the processor "
        "and our own kernels on the card"
    )
    return planned._replace(plan=replace(planned.plan, attends_in_ram=None))


def _share_products(
    planned: PlannedModel, config: ResolvedConfig, reader: StoreReader, undo: contextlib.ExitStack
) -> Sharing:
    """What the processor computes beside a card, if it does."""
    from penstock.weights.split.sharing import Sharing, streamed_share

    plan, size, hardware = planned.plan, planned.size, planned.hardware
    rates: ExpertRates | None = None
    if plan.shares_experts:
        from penstock.memory.planning.expert_lanes import expert_rates

        rates = expert_rates(size.experts, hardware, config.rows_per_token)
    sharing = Sharing.of(
        plan,
        planned.opened.store.tensors,
        reader,
        planned.kernels,
        planned.lane,
        config,
        streamed_share(plan, size, hardware, config),
        rates,
    )
    undo.callback(sharing.reader.close)
    return sharing


def _begin_ends(
    planned: PlannedModel, reader: StoreReader, shared: SharedEnds | None
) -> Callable[[], tuple[LayerWeights, LayerWeights]]:
    """Begin to read embedding and head. The function that is returned waits for them. `shared`: matrices of
    another model in place of their own."""
    tensors, lane = planned.opened.store.tensors, planned.lane
    ends = tensors.embedding, tensors.head
    has_head = shared is None or shared.head is None
    embedding_there, head_there = map(reader.begin, ends if has_head else map(beside_shared, ends))

    def wait() -> tuple[LayerWeights, LayerWeights]:
        embedding = embedding_there()
        if shared is not None:
            embedding = embedding.with_matrices({"embedding": shared.embedding})
        if shared is not None and shared.head is not None:
            return embedding, head_there().map(lane.upload).with_matrices({"head": shared.head})
        return embedding, with_head(tensors, head_there(), embedding).map(lane.upload)

    return wait


def _begin_layers(
    planned: PlannedModel, sharing: Sharing, uses: dict[UnitKey, float], undo: contextlib.ExitStack
) -> LayerStreamer:
    plan, lane = planned.plan, planned.lane
    lane.limit(plan.device_budget_bytes - CUDA_CONTEXT_BYTES)
    counts = UseCounts(planned.size.experts.count_per_token, uses)
    streamer = LayerStreamer(
        sharing.tensors, sharing.reader, lane, plan.tiers, counts, sharing.rows, sharing.expert_rates
    )
    undo.callback(streamer.close)
    return streamer


def _make_family(planned: PlannedModel, config: ResolvedConfig, kernels: Kernels) -> Family:
    spec, device = planned.opened.spec, planned.lane.torch_device
    with room_for("the tables of its positions", planned.lane):
        beside = host_kernels(config) if device.type == "cuda" else None
        family = planned.opened.family(spec, kernels, config.max_model_len, device, beside)
    assert spec.biases_scores or not any(each.has_biases for each in family.attentions)
    return family


def _allocate_cache(
    planned: PlannedModel, config: ResolvedConfig, undo: contextlib.ExitStack
) -> KVCache | SpilledKVCache:
    disk, spec, lane = planned.hardware.disk, planned.opened.spec, planned.lane
    depth = disk.depth if disk else DEFAULT_DEPTH
    cache = planned_cache(spec, planned.plan, config.spill_folder, planned.kv_layout, lane, depth)
    undo.callback(cache.close)
    return cache


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


def _predict(planned: PlannedModel, config: ResolvedConfig) -> Predict:
    """Steps repeat each other in size, and a prediction takes as long as a few kernels of a small model."""
    predict = functools.partial(predict_step, planned.plan, planned.size, planned.hardware, config)
    return functools.lru_cache(maxsize=4096)(predict)


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
    check_context(config, spec)
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
