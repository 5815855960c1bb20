"""EngineParts: all that an engine drives, made from a model's name step by step. This file alone knows which
features an engine can have."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.config import EngineConfig, ResolvedConfig
from penstock.drafters.loading import load_with_guesses
from penstock.errors import UnsupportedModel
from penstock.generation.blocks.block_manager import BlockManager
from penstock.generation.blocks.state_pool import StatePool
from penstock.generation.drafting.drafter import NO_DRAFTS, Drafter
from penstock.generation.drafting.state_paths import StatePaths
from penstock.generation.prompt_frame import PromptFrame
from penstock.generation.requests.request_limits import BeamRoom, RequestLimits
from penstock.generation.requests.request_table import RequestTable
from penstock.generation.sampler import Sampler
from penstock.generation.scheduling.batch import Batch
from penstock.generation.scheduling.scheduler import Scheduler
from penstock.generation.step_executor import Listen, LocalExecutor, StepExecutor
from penstock.generation.step_meter import StepMeter
from penstock.generation.step_observer import StepObserver, StepObservers
from penstock.goes_with import Feature, check_together
from penstock.loader import LoadedModel, Model, ModelSource, settle_processor
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.cost import Predict
from penstock.memory.planning.plan import MemoryPlan
from penstock.weights.adapters.loaded_adapters import LoadedAdapters

# A feature is imported by the step that makes it.
if TYPE_CHECKING:
    from penstock.cache.host.kv_tiers import KVTiers
    from penstock.drafters.draft_model import DraftModel
    from penstock.drafters.mtp_drafter import MTPDrafter
    from penstock.drafters.planes_drafter import PlanesDrafter
    from penstock.generation.grammars.grammar_matcher import GrammarCompiler
    from penstock.generation.pooler import Pooler
    from penstock.kv_events.publisher import Publisher
    from penstock.nodes.leader import Leader
    from penstock.nodes.member import NodeStatus
    from penstock.nodes_config import NodesConfig
    from penstock.weights.adapters.targets import Targets

    GuessingModel = DraftModel | MTPDrafter | PlanesDrafter

ReportProgress = Callable[[int, int], None]

logger = logging.getLogger(__name__)


def tell_nobody(loaded: int, total: int) -> None:
    """A ReportProgress."""


@dataclass(frozen=True)
class LoadOptions:
    """What Engine.load() gets beside the model and its config, and describes."""

    hardware: HardwareProfile | None = None
    drafter: Drafter | None = None
    nodes: NodesConfig | None = None
    report_progress: ReportProgress = tell_nobody
    is_patient: bool = True


@dataclass(frozen=True)
class Features:
    """What an engine can have beside its model. None: it has not."""

    #: Guesses in place of what the config says.
    drafter: Drafter | None = None
    #: A small model, or the head that came with the model.
    draft_model: DraftModel | MTPDrafter | None = None
    kv_tiers: KVTiers | None = None
    #: Knows the other machines that compute this model's layers.
    leader: Leader | None = None
    publisher: Publisher | None = None


@dataclass(frozen=True)
class EngineParts:
    """What an engine drives. Each part is there, whatever the features are."""

    model: Model
    plan: MemoryPlan
    config: ResolvedConfig
    limits: RequestLimits
    requests: RequestTable
    grammars: GrammarCompiler
    #: The adapters (LoRA) that requests may have.
    adapters: LoadedAdapters
    meter: StepMeter
    scheduler: Scheduler
    executor: StepExecutor
    #: What comes out of a step: tokens, or vectors and scores.
    chooser: Sampler | Pooler
    observers: StepObservers
    #: What drafts for this model: a small model, the head that came with it, or its own upper planes.
    draft_model: GuessingModel | None
    #: All machines that compute the model's layers, by rank; () where one computes all.
    nodes: Callable[[], tuple[NodeStatus, ...]]
    #: Closes everything.
    closing: ExitStack


def load_parts(source: ModelSource, config: EngineConfig, options: LoadOptions) -> EngineParts:
    """From a model's name to the parts of its engine. Raises what Engine.load() raises."""
    closing, hardware = ExitStack(), options.hardware
    try:
        _warn_of_unknown_rates(config, options)
        settle_processor(config, hardware)
        config, leader = _find_machines(source, config, options, closing)
        publisher = _open_publisher(config, closing)
        share = None if leader is None else leader.share
        loaded, draft_model = load_with_guesses(source, config, hardware, share, closing)
        kv_tiers = _open_kv_tiers(loaded, hardware, closing)
        features = Features(options.drafter, draft_model, kv_tiers, leader, publisher)
        parts = make_parts(loaded, features, closing)
        for name, adapter in config.adapters:
            parts.adapters.load(name, adapter)
        _wait_until_loaded(loaded, leader, options)
    except BaseException:
        closing.close()
        raise
    return parts


def make_parts(
    loaded: LoadedModel, features: Features = Features(), closing: ExitStack | None = None
) -> EngineParts:
    """The parts around a model that is loaded. `closing` has what closes the model and its features; None:
    there are no features."""
    from penstock.generation.grammars.grammar_matcher import GrammarCompiler

    model, plan, config = loaded.model, loaded.plan, loaded.config
    if closing is None:
        closing = ExitStack()
        closing.callback(model.close)
    meter = _meter(loaded, features)
    blocks = _block_manager(loaded, features, meter)
    draft_model = _draft_model(loaded, features, blocks, meter.predict)
    scheduler = _scheduler(loaded, features, blocks, meter, draft_model)
    executor, nodes = _executor(loaded, features, scheduler, meter)
    grammars = GrammarCompiler(model.tokenizer, model.spec.vocab_size)
    closing.callback(grammars.close)
    _count(meter, blocks, features)
    for store in features.kv_tiers or ():
        store.is_idle = lambda: not scheduler.has_work
    frame, num_tokens = PromptFrame.of(model.spec, model.pooling), model.max_text_len
    return EngineParts(
        model=model,
        plan=plan,
        config=config,
        limits=_limits(loaded, grammars),
        requests=RequestTable(scheduler, model.tokenizer, grammars, num_tokens, frame),
        grammars=grammars,
        adapters=LoadedAdapters(functools.partial(_targets, model), config.adapter_bytes or 0),
        meter=meter,
        scheduler=scheduler,
        executor=executor,
        chooser=_chooser(model),
        observers=_observers(meter, features),
        draft_model=draft_model,
        nodes=nodes,
        closing=closing,
    )


def _warn_of_unknown_rates(config: EngineConfig, options: LoadOptions) -> None:
    if options.hardware is None and options.drafter is None and config.speculation == "auto":
        logger.info(
            "nothing was measured of this machine (Engine.load() got no `hardware`): no token is guessed "
            "ahead, since nobody knows what pays; penstock.measure.measure_hardware() makes `hardware`"
        )


def _find_machines(
    source: ModelSource, config: EngineConfig, options: LoadOptions, closing: ExitStack
) -> tuple[EngineConfig, Leader | None]:
    """The machines that compute the layers with this one; None: this one computes all."""
    if options.nodes is None:
        return config, None
    from penstock.nodes.leader import Leader

    leader = Leader(options.nodes, str(source.model), options.report_progress)
    closing.callback(leader.close)
    return replace(config, mtp="off" if config.mtp == "auto" else config.mtp), leader


def _open_publisher(config: EngineConfig, closing: ExitStack) -> Publisher | None:
    if config.kv_events is None:
        return None
    from penstock.kv_events.publisher import Publisher

    publisher = Publisher(config.kv_events, config.block_size)
    closing.callback(publisher.close)
    return publisher


def _open_kv_tiers(
    loaded: LoadedModel, hardware: HardwareProfile | None, closing: ExitStack
) -> KVTiers | None:
    config = loaded.config
    if config.kv_disk is None and config.kv_host_bytes is None:
        return None
    from penstock.kv_disk.opening import open_kv_tiers

    disk = None if hardware is None else hardware.disk
    tiers = open_kv_tiers(loaded.model, loaded.plan, config, disk)
    closing.callback(tiers.close)
    return tiers


def _wait_until_loaded(loaded: LoadedModel, leader: Leader | None, options: LoadOptions) -> None:
    """Here and on all other machines. Requests wait for a lost machine only for so long, so a leader is
    always patient."""
    if options.is_patient or leader is not None:
        loaded.model.streamer.tiers.wait_until_loaded(options.report_progress)
    if leader is not None:
        leader.wait_until_loaded()


def _meter(loaded: LoadedModel, features: Features) -> StepMeter:
    model, leader = loaded.model, features.leader
    return StepMeter(
        loaded.plan,
        model.streamer,
        loaded.predict if leader is None else leader.predict(loaded.predict),
        loaded.config.max_num_seqs,
        model.executor.caches.expected,
        model.executor.kv_cache.stats,
    )


def _block_manager(loaded: LoadedModel, features: Features, meter: StepMeter) -> BlockManager:
    plan, config, tiers, publisher = loaded.plan, loaded.config, features.kv_tiers, features.publisher
    return BlockManager(
        plan.num_kv_blocks,
        config.block_size,
        config.enable_prefix_caching,
        states=StatePool(plan.num_state_slots, plan.num_state_sequences, plan.guess_room),
        store=tiers,
        compute_s=lambda num_tokens: meter.prompt_s(num_tokens, config.max_num_batched_tokens),
        pieces=None if tiers is None else tiers.pieces,
        log=None if publisher is None else publisher.log,
    )


def _draft_model(
    loaded: LoadedModel, features: Features, blocks: BlockManager, predict: Predict
) -> GuessingModel | None:
    model, plan, config, small = loaded.model, loaded.plan, loaded.config, features.draft_model
    if not config.draft_with_planes:
        return small
    from penstock.drafters.planes_drafter import PlanesDrafter, check_planes

    check_planes(model, plan)
    return PlanesDrafter(model, plan, blocks, config, predict)


def _scheduler(
    loaded: LoadedModel,
    features: Features,
    blocks: BlockManager,
    meter: StepMeter,
    draft_model: GuessingModel | None,
) -> Scheduler:
    model, config = loaded.model, loaded.config
    paths = StatePaths.of(loaded.plan, meter.predict)
    drafter = features.drafter or _drafter(config, meter, draft_model, paths)
    return Scheduler(
        blocks,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        step_time_target_s=config.step_time_target_s or 0.0,
        predict_s=meter.predict_s,
        rope=model.spec.rope,
        drafter=NO_DRAFTS if model.pooling else drafter,
        num_groups=1 if features.leader is None else features.leader.nodes.num_nodes,
    )


def _drafter(
    config: ResolvedConfig, meter: StepMeter, draft_model: GuessingModel | None, paths: StatePaths
) -> Drafter:
    """Guesses pay only where the time of a step is known before."""
    if config.speculation == "off":
        return NO_DRAFTS
    from penstock.generation.drafting.speculation import Speculation

    return Speculation(
        meter.known_s, draft_model, config, lambda: meter.metrics.last_step, path_s=paths.seconds
    )


def _executor(
    loaded: LoadedModel, features: Features, scheduler: Scheduler, meter: StepMeter
) -> tuple[StepExecutor, Callable[[], tuple[NodeStatus, ...]]]:
    """What computes steps, and what tells of the machines."""
    executor, size, leader = loaded.model.executor, loaded.config.block_size, features.leader
    if leader is None:
        return LocalExecutor(executor, scheduler, size, _listener(features.draft_model)), lambda: ()
    from penstock.nodes.piped_executor import PipedExecutor

    piped = PipedExecutor(leader, executor, scheduler, meter.predict_s, size)
    return piped, functools.partial(piped.status, loaded.plan)


def _listener(draft_model: DraftModel | MTPDrafter | None) -> Callable[[Batch], Listen | None]:
    """Who gets the hidden states of a step: a head that guesses."""
    if draft_model is None:
        return lambda batch: None
    from penstock.drafters.mtp_drafter import MTPDrafter

    return draft_model.listen if isinstance(draft_model, MTPDrafter) else lambda batch: None


def _chooser(model: Model) -> Sampler | Pooler:
    if model.pooling is not None:
        from penstock.generation.pooler import Pooler

        return Pooler(model.pooling)
    return Sampler(model.spec.vocab_size, model.tokenizer.eos_token_ids, model.spec.never_first)


def _observers(meter: StepMeter, features: Features) -> StepObservers:
    found: list[StepObserver] = [meter]
    if features.kv_tiers is not None:
        from penstock.kv_disk.tiers_observer import TiersObserver

        found.append(TiersObserver(features.kv_tiers))
    if features.publisher is not None:
        found.append(features.publisher)
    return StepObservers(found)


def _count(meter: StepMeter, blocks: BlockManager, features: Features) -> None:
    """Have what the parts count themselves among the engine's figures."""
    metrics = meter.metrics
    metrics.preemptions = blocks.departures.counts
    metrics.kv_events = features.publisher.stats if features.publisher is not None else None
    stats = {store.tier.name: store.stats for store in features.kv_tiers or ()}
    for name, each in stats.items():
        each.reads = blocks.disk.reads[name]
    metrics.kv_host, metrics.kv_disk = stats.get("host"), stats.get("disk")


def _limits(loaded: LoadedModel, grammars: GrammarCompiler) -> RequestLimits:
    model, config = loaded.model, loaded.config
    return RequestLimits(
        model.spec,
        model.max_text_len,
        model.is_context_cut,
        grammars,
        BeamRoom(config.max_num_seqs, loaded.plan.num_kv_blocks, config.block_size),
        max_step_tokens=config.max_num_batched_tokens,
        pooling=model.pooling,
    )


def _targets(model: Model) -> Targets:
    """What adapters can change. Raises UnsupportedModel."""
    from penstock.weights.adapters.targets import Targets

    check_together({Feature.LORA, *model.spec.features}, model.spec.architecture, UnsupportedModel)
    return Targets(model.store, model.executor.family.unadapted)
