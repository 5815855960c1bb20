"""Engine: add requests, step, collect what each gained. Synchronous and single-threaded."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from pathlib import Path

from penstock.config import EngineConfig, ResolvedConfig
from penstock.drafters.draft_model import DraftModel
from penstock.drafters.loading import ModelSource, load_with_guesses
from penstock.drafters.mtp_drafter import MTPDrafter
from penstock.drafters.planes_drafter import PlanesDrafter, check_planes
from penstock.drafters.two_levels import TwoLevels
from penstock.errors import STEP_ERRORS, UnsupportedModel
from penstock.generation.drafting.asking import Guesser
from penstock.generation.drafting.drafter import NO_DRAFTS, Drafter
from penstock.generation.drafting.speculation import Speculation
from penstock.generation.executor import Cancelled
from penstock.generation.grammars.grammar_matcher import GrammarCompiler
from penstock.generation.model_inputs import ModelInputs
from penstock.generation.pooler import Pooler
from penstock.generation.prompt_frame import PromptFrame
from penstock.generation.requests.completion import Completion
from penstock.generation.requests.generation_request import (
    GenerationRequest,
    PoolingParams,
    SamplingParams,
    ValidRequest,
)
from penstock.generation.requests.request import RequestOutput
from penstock.generation.requests.request_limits import BeamRoom, RequestLimits
from penstock.generation.requests.request_table import RequestTable
from penstock.generation.sampler import Sampler
from penstock.generation.scheduling.block_manager import BlockManager
from penstock.generation.scheduling.events.block_log import BlockLog
from penstock.generation.scheduling.scheduler import Scheduler
from penstock.generation.scheduling.states.state_pool import StatePool
from penstock.generation.sequence import FinishReason
from penstock.generation.step_meter import StepMeter
from penstock.kv_disk.opening import open_kv_tiers
from penstock.kv_events.opening import check_events, open_publisher
from penstock.kv_events.publisher import Publisher
from penstock.loader import Model
from penstock.memory.hardware import HardwareProfile
from penstock.memory.kv_host.kv_tiers import KVTiers
from penstock.memory.kv_spill.spilled_cache import SpilledKVCache
from penstock.memory.planning.cost import Predict
from penstock.memory.planning.plan import MemoryPlan
from penstock.memory.spare_memory import SpareMemory
from penstock.nodes.leader import Leader
from penstock.nodes.member import NodeStatus
from penstock.nodes.piped_steps import PipedSteps
from penstock.nodes_config import NodesConfig
from penstock.text.prompt_forms import PromptForms
from penstock.text.tokenizer import Tokenizer
from penstock.weights.adapters.loaded_adapters import LoadedAdapters
from penstock.weights.adapters.targets import Targets

__all__ = ["Completion", "Engine", "ReportProgress"]

ReportProgress = Callable[[int, int], None]
GuessingModel = DraftModel | MTPDrafter | PlanesDrafter | TwoLevels

logger = logging.getLogger(__name__)


class Engine:
    """A loaded model and everything that is being computed with it."""

    def __init__(
        self,
        model: Model,
        plan: MemoryPlan,
        config: ResolvedConfig,
        predict: Predict,
        drafter: Drafter | None = None,
        draft_model: DraftModel | MTPDrafter | None = None,
        kv_tiers: KVTiers | None = None,
        leader: Leader | None = None,
        publisher: Publisher | None = None,
    ) -> None:
        """Engine.load() makes the parts from a model's name. `predict` says how long a step of (num_tokens,
        num_sampled) should take by what was measured of the hardware."""
        self.model = model
        #: What guesses for this model: a small model, the head that came with it, its own upper planes, or
        #: these with a small model before them.
        self.draft_model: GuessingModel | None = draft_model
        self.plan = plan
        self.config = config
        self.spec, self.tokenizer = model.spec, model.tokenizer
        self.executor, self.streamer = model.executor, model.streamer
        #: The model's own advice (generation_config.json), for whoever builds SamplingParams.
        self.default_sampling = model.default_sampling
        #: Tokens of a prompt and its answer; the model's own soft prompt takes what is left.
        self.max_model_len = model.max_model_len - len(model.spec.soft_prompt)
        #: How the model makes vectors or scores; None for a model that writes.
        self.pooling = model.pooling
        self.sampler = _sampler(model)
        self.grammars = GrammarCompiler(model.tokenizer, model.spec.vocab_size)
        #: The adapters (LoRA) that requests may have.
        self.adapters = LoadedAdapters(functools.partial(_targets, model), config.adapter_bytes or 0)
        self.limits = self._limits()
        #: How the model is asked to complete a text and to fill in blanks.
        self.forms = PromptForms(model.tokenizer, model.spec.has_encoder)
        #: Knows the other machines that compute this model's layers; None: this machine computes all.
        self.leader = leader
        predict = predict if leader is None else leader.predict(predict)
        self.meter = _meter(model, plan, config, predict)
        self.metrics = self.meter.metrics
        #: Keeps blocks of keys and values beyond the KV cache, if the config asks for that.
        self.kv_tiers = kv_tiers
        #: The tiers by themselves.
        self.kv_host = kv_tiers.find("host") if kv_tiers is not None else None
        self.kv_disk = kv_tiers.find("disk") if kv_tiers is not None else None
        self._publisher = publisher
        self._block_log = BlockLog(config.block_size) if publisher is not None else None
        blocks = self._block_manager(kv_tiers)
        if config.draft_with_planes:
            check_planes(model, plan, draft_model is not None)
            planes = PlanesDrafter(model, plan, blocks, config, predict)
            self.draft_model = planes
            if isinstance(draft_model, DraftModel):
                self.draft_model = TwoLevels(draft_model, planes)
        self.scheduler = self._scheduler(blocks, drafter)
        self._follow_tiers()
        frame = PromptFrame.of(model.spec, model.pooling)
        self.requests = RequestTable(self.scheduler, self.tokenizer, self.grammars, self.max_model_len, frame)
        #: Has the steps on their way through several machines.
        self.piped = self._pipe(leader) if leader is not None else None

    def _limits(self) -> RequestLimits:
        model, config = self.model, self.config
        room = BeamRoom(config.max_num_seqs, self.plan.num_kv_blocks, config.block_size)
        return RequestLimits(
            model.spec,
            self.max_model_len,
            model.is_context_cut,
            self.grammars,
            room,
            config.max_num_batched_tokens,
            model.pooling,
        )

    def _scheduler(self, blocks: BlockManager, drafter: Drafter | None) -> Scheduler:
        model, config = self.model, self.config
        return Scheduler(
            blocks,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.step_time_target_s or 0.0,
            self.meter.predict_s,
            model.spec.rope,
            NO_DRAFTS if model.pooling else drafter or _drafter(config, self.meter, self.draft_model),
            1 if self.leader is None else self.leader.nodes.num_nodes,
        )

    def _follow_tiers(self) -> None:
        """Count what the tiers and the publisher do, and let the tiers know when there is no work."""
        self.metrics.kv_events = self._publisher.stats if self._publisher is not None else None
        self.metrics.kv_host = self.kv_host.stats if self.kv_host is not None else None
        self.metrics.kv_disk = self.kv_disk.stats if self.kv_disk is not None else None
        scheduler = self.scheduler
        for store in self.kv_tiers or ():
            store.is_idle = lambda: not scheduler.has_work

    def _pipe(self, leader: Leader) -> PipedSteps:
        assert isinstance(self.sampler, Sampler), "a model that pools is refused before"
        size = self.config.block_size
        return PipedSteps(
            leader, self.executor, self.scheduler, self.requests, self.sampler, self.meter, size
        )

    def _block_manager(self, kv_tiers: KVTiers | None) -> BlockManager:
        plan, config, meter = self.plan, self.config, self.meter
        return BlockManager(
            plan.num_kv_blocks,
            config.block_size,
            config.enable_prefix_caching,
            StatePool(plan.num_state_slots, plan.num_state_sequences),
            kv_tiers,
            lambda num_tokens: meter.prompt_s(num_tokens, config.max_num_batched_tokens),
            None if kv_tiers is None else kv_tiers.pieces,
            self._block_log,
        )

    @classmethod
    def load(
        cls,
        model: str | Path,
        config: EngineConfig | None = None,
        *,
        report_progress: ReportProgress | None = None,
        offline: bool = False,
        revision: str | None = None,
        is_patient: bool = True,
        tokenizer: Tokenizer | None = None,
        hardware: HardwareProfile | None = None,
        cache_folder: Path | None = None,
        drafter: Drafter | None = None,
        nodes: NodesConfig | None = None,
        spare: SpareMemory | None = None,
    ) -> Engine:
        """Load a folder, a .gguf file, a hub repository ("owner/name") or "demo", layer by layer.

        report_progress(loaded, total) is called after each layer that stays in memory; it may raise to end
        the loading. load() returns when all these layers are in memory. If not `is_patient`, it returns at
        once, and the first step computes each layer as it arrives. `tokenizer` replaces the folder's own; a
        draft model keeps its own, with which it is compared.
        `hardware` holds measured rates (measure_hardware() of penstock.measure); without it only the free
        memory is looked up, and no token is guessed ahead, since nobody knows what pays. `cache_folder` keeps
        kernels that are compiled for a GPU. `drafter` guesses tokens ahead, in place of what
        config.speculation says: guesses change how many steps an answer takes, and nothing else. `nodes`:
        this is the leader of several machines, each of which computes some of the layers; load() waits for
        them, patient or not. `spare` lends memory of models that left, and takes it back when the engine
        object is gone. Raises kinds of CheckpointError if the files are at fault, and CapacityError if
        something does not fit.
        """
        config = config or EngineConfig()
        with contextlib.ExitStack() as undo:
            leader = None
            if nodes is not None:
                config = replace(config, mtp="off" if config.mtp == "auto" else config.mtp)
                tell = report_progress or (lambda loaded, total: None)
                leader = Leader(nodes, str(model), lambda: tell(0, 0))
                undo.callback(leader.close)
            source = ModelSource(model, offline, revision, tokenizer, cache_folder, spare)
            engine = cls._begin_loading(source, config, hardware, drafter, leader, undo)
            for name, adapter in config.adapters:
                engine.adapters.load(name, adapter)
            undo.pop_all()
        if is_patient or leader is not None:  # requests wait for a lost worker only for so long
            engine._wait_until_loaded(report_progress)
        return engine

    @classmethod
    def _begin_loading(
        cls,
        source: ModelSource,
        config: EngineConfig,
        hardware: HardwareProfile | None,
        drafter: Drafter | None,
        leader: Leader | None,
        undo: contextlib.ExitStack,
    ) -> Engine:
        """An engine whose layers are on their way. `undo` closes its parts."""
        if hardware is None and drafter is None and config.speculation == "auto":
            logger.info(
                "nothing was measured of this machine (Engine.load() got no `hardware`): no token is guessed "
                "ahead, since nobody knows what pays; penstock.measure.measure_hardware() makes `hardware`"
            )
        publisher = open_publisher(config)
        if publisher is not None:
            undo.callback(publisher.close)
        share = None if leader is None else leader.share
        loaded, draft_model = load_with_guesses(source, config, hardware, share, undo)
        disk = None if hardware is None else hardware.disk
        kv_tiers = open_kv_tiers(loaded.model, loaded.plan, loaded.config, disk)
        if kv_tiers is not None:
            undo.callback(kv_tiers.close)
        check_events(loaded.config, loaded.model.spec)
        return cls(
            loaded.model,
            loaded.plan,
            loaded.config,
            loaded.predict,
            drafter,
            draft_model,
            kv_tiers,
            leader,
            publisher,
        )

    def _wait_until_loaded(self, report_progress: ReportProgress | None) -> None:
        """Here and on all other machines. Closes the engine if it raises."""
        try:
            self.streamer.tiers.wait_until_loaded(report_progress)
            if self.leader is not None:
                self.leader.wait_until_loaded()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop reading, close the files, and free a GPU's memory. Nothing can be computed afterwards. The
        host's memory is freed when the engine object is gone. Keys and values that shall be kept on disk are
        written before, which takes seconds at most."""
        self.grammars.close()
        if self.kv_tiers is not None:
            self.kv_tiers.close()
        if self._publisher is not None:
            self._publisher.close()
        if self.leader is not None:
            self.leader.close()
        self.model.close()
        if self.draft_model is not None:
            self.draft_model.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or (self.piped is not None and self.piped.num_flights > 0)

    @property
    def guessers(self) -> tuple[GuessingModel, ...]:
        """What guesses beside the texts. Of several, each step has the one that has brought most."""
        model = self.draft_model
        if isinstance(model, TwoLevels):
            return model.rivals
        return () if model is None else (model,)

    @property
    def nodes(self) -> tuple[NodeStatus, ...]:
        """All machines that compute the model's layers, by rank; () where one computes all. Safe from any
        thread."""
        if self.leader is None or self.piped is None:
            return ()
        return (self.piped.own_status(self.plan), *self.leader.status())

    def validate(self, request: GenerationRequest) -> ValidRequest:
        """RequestLimits.validate(): the request, if it can be computed. Safe from any thread."""
        return self.limits.validate(request)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises what validate() raises, InvalidParameter if another request with the same
        id is being computed, RequestFailed if the tokenizer can't take the prompt."""
        self.requests.add(self.validate(request))
        self.metrics.prompt_tokens += request.num_prompt_tokens

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks. An unknown (or finished) id is ignored."""
        self.requests.end(request_id, FinishReason.ABORT)
        self.meter.look_at(self.scheduler)

    def has_started(self, request_id: str) -> bool:
        """Whether a request has had a place in a step. Safe from any thread, also while a step hangs."""
        return self.requests.has_started(request_id)

    def expire(self, now: float) -> list[RequestOutput]:
        """End the requests whose time is up. Each gets an output with its error, QueueTimeout or
        DeadlineExceeded. `now` is of the same clock as their start_by and finish_by."""
        if expired := self.requests.expire(now):
            self.meter.look_at(self.scheduler)
        return expired

    def step(self, aborted: Set[str] = frozenset()) -> list[RequestOutput]:
        """Compute one sweep. Returns [] if nothing is pending, and, after a moment, if all that is pending
        waits for keys and values from disk.

        `aborted` may grow while the sweep runs (another thread adds request ids): once all requests of the
        step are in it, the sweep ends between two layers and nothing is delivered. A request that can't
        be computed ends with an `error` in its output. Raises StepFailed if a layer could not be read: the
        step's requests are ended then, and the engine goes on.

        On several machines, several steps are on their way: step() ends the oldest, or returns [] after a
        moment. MachineAway, a StepFailed, then says that a machine has been away for too long.
        """
        try:
            return self._step(aborted)
        finally:
            self._publish()

    def look(self) -> None:
        """Between steps, also while there is no work: forget what was computed with machines that were lost,
        and tell routers of it."""
        if self.piped is not None:
            self.piped.look()
        self._publish()

    def _publish(self) -> None:
        if self._publisher is not None and self._block_log is not None:
            self._publisher.publish(self._block_log.take())

    def _step(self, aborted: Set[str]) -> list[RequestOutput]:
        if self.piped is not None:
            return self.piped.step(aborted)
        self.meter.begin()
        running = self.scheduler.admission.running
        pasts = ((each.block_table, each.num_computed_tokens) for each in running)
        self.meter.expect_spilled(self.executor.caches.expected(pasts))
        batch = self.scheduler.schedule()
        if not batch:
            if self.kv_tiers is not None and self.has_work:
                self.kv_tiers.wait()
            return []
        try:
            inputs = ModelInputs.of(batch, self.config.block_size)
            is_cancelled, head = self.requests.start(batch, aborted), self.draft_model
            if isinstance(head, MTPDrafter):
                logits = self.executor.forward(inputs, is_cancelled, head.listen(batch))
            else:
                logits = self.executor.forward(inputs, is_cancelled)
            chosen = self.sampler.sample(logits, batch)
        except Cancelled:
            self.scheduler.rollback(batch)
            return []
        except STEP_ERRORS as error:
            failure = self.requests.fail(batch, error)
            self.meter.look_at(self.scheduler)
            raise failure from error
        except BaseException:  # nobody may find K and V in the cache that were never computed
            self.scheduler.rollback(batch)
            raise
        outputs = self.requests.deliver(self.scheduler.update(batch, chosen))
        self.meter.record(batch, chosen, outputs)
        self.meter.look_at(self.scheduler)
        return outputs

    def pool(self, texts: list[list[int]], params: PoolingParams | None = None) -> list[list[float]]:
        """The vector of each text (token ids), or the score of each pair, as [score], of a model that pools.
        For scripts and tests. Raises what add() and step() raise, and RequestFailed."""
        found: dict[str, list[float]] = {f"pool-{index}": [] for index in range(len(texts))}
        try:
            for request_id, text in zip(found, texts, strict=True):
                no_tokens = SamplingParams(max_tokens=0)
                self.add(GenerationRequest(text, no_tokens, request_id, pooling=params or PoolingParams()))
            while self.has_work:
                for output in self.step():
                    if output.error is not None:
                        raise output.error
                    found[output.request_id] = list(output.pooled or ())
        finally:
            for request_id in found:
                self.abort(request_id)
        return list(found.values())

    def generate(
        self, prompts: list[list[int]], params: SamplingParams | Iterable[SamplingParams]
    ) -> list[Completion]:
        """Answer all prompts (token ids) and return when the last answer is complete. For scripts and tests;
        not to be mixed with add() and step(). Raises what add() and step() raise, and RequestFailed."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        completions = {f"generate-{index}": Completion() for index in range(len(prompts))}
        try:
            for request_id, prompt, own_params in zip(completions, prompts, each, strict=True):
                self.add(GenerationRequest(prompt, own_params, request_id))
            while self.has_work:
                for output in self.step():
                    if output.error is not None:
                        raise output.error
                    completions[output.request_id].extend(output)
        finally:
            for request_id in completions:
                self.abort(request_id)
        return list(completions.values())


def _sampler(model: Model) -> Sampler | Pooler:
    if model.pooling is not None:
        return Pooler(model.pooling)
    return Sampler(model.spec.vocab_size, model.tokenizer.eos_token_ids, model.spec.never_first)


def _meter(model: Model, plan: MemoryPlan, config: ResolvedConfig, predict: Predict) -> StepMeter:
    cache = model.executor.kv_cache
    spill = cache.stats if isinstance(cache, SpilledKVCache) else None
    return StepMeter(plan, model.streamer, predict, config.max_num_seqs, spill)


def _drafter(config: EngineConfig, meter: StepMeter, draft_model: Guesser | None) -> Drafter:
    """Guesses pay only where the time of a step is known before."""
    if config.speculation == "off":
        return NO_DRAFTS
    rivals = draft_model.rivals if isinstance(draft_model, TwoLevels) else ()
    return Speculation(meter.known_s, draft_model, config, meter.usual.of, rivals)


def _targets(model: Model) -> Targets:
    """What adapters can change. Raises UnsupportedModel."""
    if model.spec.implementation != "penstock":
        raise UnsupportedModel(
            f"adapters need a family of Penstock's own, and {model.spec.architecture} is computed by "
            "transformers' modules: merge the adapter into the model with peft"
        )
    return Targets(model.store, model.executor.family.unadapted)
