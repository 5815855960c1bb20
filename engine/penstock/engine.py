"""Engine: add requests, step, collect what each gained. Synchronous and single-threaded."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from penstock.config import EngineConfig, ResolvedConfig
from penstock.errors import (
    CheckpointError,
    ContextOverflow,
    InvalidParameter,
    StepFailed,
)
from penstock.generation.batch import ModelInputs
from penstock.generation.block_manager import BlockManager
from penstock.generation.chosen import Chosen
from penstock.generation.drafter import NO_DRAFTS, Drafter
from penstock.generation.executor import Cancelled
from penstock.generation.generation_request import GenerationRequest, SamplingParams, ValidRequest
from penstock.generation.grammars.grammar_matcher import GrammarCompiler
from penstock.generation.request import Request, RequestOutput
from penstock.generation.sampler import Sampler
from penstock.generation.scheduler import Batch, Scheduler
from penstock.generation.sequence import FinishReason, Sequence, TokenLogprobs
from penstock.loader import Model, load_model
from penstock.memory.cost import UNKNOWN, MeasuredSteps, StepPrediction
from penstock.memory.hardware import HardwareProfile
from penstock.memory.plan import MemoryPlan
from penstock.metrics import EngineMetrics, StepStats
from penstock.text.tokenizer import Tokenizer

KV_LIMIT = ", which is what its keys and values have room for (--kv-tokens, --kv-cache-memory)"
ReportProgress = Callable[[int, int], None]


@dataclass
class Completion:
    """A whole answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def extend(self, output: RequestOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


def _weakly(method: Callable[[int], float]) -> Callable[[int], float]:
    """A bound method that does not keep its object. A scheduler that kept its engine would keep the engine's
    memory, too, until a garbage collection."""
    reference = weakref.WeakMethod(method)

    def call(number: int) -> float:
        alive = reference()
        assert alive is not None
        return alive(number)

    return call


class Engine:
    """A loaded model and everything that is being computed with it."""

    def __init__(
        self,
        model: Model,
        plan: MemoryPlan,
        config: ResolvedConfig,
        predict: Callable[[int, int], StepPrediction],
        drafter: Drafter = NO_DRAFTS,
    ) -> None:
        """Engine.load() makes the parts from a model's name. `predict` says how long a step of (num_tokens,
        num_sampled) should take by what was measured of the hardware."""
        self.model = model
        self.plan = plan
        self.config = config
        self.predict = predict
        self.spec, self.tokenizer = model.spec, model.tokenizer
        self.executor, self.streamer = model.executor, model.streamer
        #: The model's own advice (generation_config.json), for whoever builds SamplingParams.
        self.default_sampling = model.default_sampling
        self.max_model_len = min(model.max_model_len, plan.num_kv_tokens)
        #: It is the KV cache that holds no more.
        self.is_context_cut = self.max_model_len == plan.num_kv_tokens
        self.sampler = Sampler(model.spec.vocab_size, model.tokenizer.eos_token_ids)
        self.grammars = GrammarCompiler(model.tokenizer, model.spec.vocab_size)
        self._measured = MeasuredSteps()
        self.scheduler = Scheduler(
            BlockManager(plan.num_kv_blocks, config.block_size, config.enable_prefix_caching),
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.step_time_target_s or 0.0,
            _weakly(self._predict_s),
            model.spec.rope,
            drafter,
        )
        streamer = model.streamer
        self.metrics = EngineMetrics(
            kv_blocks_total=plan.num_kv_blocks,
            num_resident_layers=streamer.tiers.num_resident,
            num_streamed_layers=streamer.num_layers - streamer.tiers.num_resident,
            pinned_bytes=streamer.tiers.pinned_bytes,
            unpinned_bytes=streamer.tiers.unpinned_bytes,
            links=streamer.tiers.traffic,
        )
        self._requests: dict[str, Request] = {}
        self._num_added = 0

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
        drafter: Drafter = NO_DRAFTS,
    ) -> Engine:
        """Load a folder, a .gguf file, a hub repository ("owner/name") or "demo", layer by layer.

        report_progress(loaded, total) is called after each layer that stays in memory, and may raise to
        give up. Returns when all of them are there, or at once if not `is_patient`: the first step then
        computes each layer as it arrives. `tokenizer` replaces the folder's own; `hardware` is what was
        measured, and without it only the free memory is looked up; `cache_folder` keeps kernels that are
        compiled for a GPU; `drafter` guesses tokens ahead, which changes how many steps an answer takes and
        nothing else. Raises CheckpointError kinds for what is wrong with the files, CapacityError for what
        does not fit.
        """
        loaded = load_model(
            model, config or EngineConfig(), offline, revision, tokenizer, hardware, cache_folder
        )
        engine = cls(loaded.model, loaded.plan, loaded.config, loaded.predict, drafter)
        if is_patient:
            try:
                engine.streamer.wait_until_loaded(report_progress)
            except BaseException:
                engine.close()
                raise
        return engine

    def close(self) -> None:
        """Stop reading, close the files and give a GPU's memory back. Nothing can be computed afterwards."""
        self.grammars.close()
        self.model.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def validate(self, request: GenerationRequest) -> ValidRequest:
        """The request, if it can be computed. One that validate() has given is not looked at again. Safe from
        any thread; a new grammar may take a while.

        Raises InvalidParameter and ContextOverflow.
        """
        if isinstance(request, ValidRequest):
            return request
        prompt_token_ids, params = request.prompt_token_ids, request.params
        vocab_size, num_prompt = self.spec.vocab_size, len(prompt_token_ids)
        if not prompt_token_ids:
            raise InvalidParameter("prompt", "the prompt is empty; it needs at least one token")
        if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= vocab_size:
            raise InvalidParameter("prompt", f"prompt token ids must lie in 0..{vocab_size - 1}")
        for name, token_ids in (
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("bad_words", [token_id for word in params.bad_words for token_id in word]),
        ):
            if max(token_ids, default=0) >= vocab_size:
                raise InvalidParameter(name, f"{name} has a token id above {vocab_size - 1}")
        for name in ("allowed_token_ids", "stop_token_ids"):
            if len(getattr(params, name) or ()) > vocab_size:
                raise InvalidParameter(
                    name, f"{name} has more than the {vocab_size} token ids that there are"
                )
        if params.grammar is not None:
            self.grammars.check(params.grammar)
        wanted = 1 if params.max_tokens is None else params.max_tokens
        if num_prompt + wanted > self.max_model_len:
            context = f"{self.max_model_len} tokens{KV_LIMIT if self.is_context_cut else ''}"
            message = (
                f"the prompt has {num_prompt} tokens and {wanted} more are asked for, together "
                f"{num_prompt + wanted}; this model's context here is {context}. Shorten the prompt or ask "
                "for fewer"
            )
            if num_prompt >= self.max_model_len:
                message = (
                    f"the prompt has {num_prompt} tokens; this model's context here is {context}, and an "
                    "answer has to fit into it as well. Shorten the prompt"
                )
            raise ContextOverflow(message, num_prompt, self.max_model_len)
        return ValidRequest.of(request)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Raises what validate() raises, InvalidParameter if another with its id is being
        computed, RequestFailed if the tokenizer can't take the prompt."""
        request = self.validate(request)
        if request.request_id in self._requests:
            raise InvalidParameter("request_id", f"request {request.request_id} is being computed already")
        params, limit = request.params, self.max_model_len
        if params.max_tokens is not None:
            limit = len(request.prompt_token_ids) + params.max_tokens
        matcher = self.grammars.matcher(params.grammar) if params.grammar else None
        sequence = Sequence(self._num_added, request, limit, matcher)
        self._num_added += 1
        self._requests[request.request_id] = Request(sequence, self.tokenizer)
        self.scheduler.add(sequence)
        self.metrics.prompt_tokens += sequence.num_prompt_tokens

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks. Unknown (or finished) ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, FinishReason.ABORT)

    def expire(self, now: float) -> list[RequestOutput]:
        """End the requests whose time is up; each gets an output with its error, QueueTimeout or
        DeadlineExceeded. `now` is of the same clock as their start_by and finish_by."""
        outputs = [output for request in self._requests.values() if (output := request.expire(now))]
        for output in outputs:
            self._end(self._requests[output.request_id], FinishReason.ERROR)
        return outputs

    def step(self, aborted: Container[str] = ()) -> list[RequestOutput]:
        """Compute one sweep; [] if nothing is pending.

        `aborted` may grow while the sweep runs (another thread adds request ids): once it holds all of
        the step's requests, the sweep ends between two layers and nothing is delivered. A request that can't
        be computed ends with an `error` in its output. Raises StepFailed if a layer could not be read: the
        step's requests are ended then, the engine goes on.
        """
        before = time.perf_counter(), self.streamer.tiers.streamed_bytes, self.streamer.stall_s
        batch = self.scheduler.schedule()
        if not batch:
            return []
        requests = [self._requests[item.sequence.request.request_id] for item in batch.scheduled]
        inputs = ModelInputs.of(batch, self.scheduler.block_manager.block_size)
        try:
            logits = self.executor.forward(inputs, self._begin(requests, aborted))
            chosen = self.sampler.sample(logits, batch)
        except Cancelled:
            self.scheduler.rollback(batch)
            return []
        except CheckpointError as error:
            raise self._fail(batch, requests, error) from error
        outputs = self._deliver(self.scheduler.update(batch, chosen))
        self._record(batch, outputs, *before)
        return outputs

    def _begin(self, requests: list[Request], aborted: Container[str]) -> Callable[[], bool]:
        """Whether nobody wants the step any more, to be asked while it is computed."""
        now = time.monotonic()
        for request in requests:
            request.start(now)
        ids = [request.request_id for request in requests]
        return lambda: all(request_id in aborted for request_id in ids)

    def _fail(self, batch: Batch, requests: list[Request], error: CheckpointError) -> StepFailed:
        """End the step's requests: it can't be computed."""
        self.scheduler.rollback(batch)
        for request in requests:
            self._end(request, FinishReason.ERROR)
        return StepFailed([request.request_id for request in requests], str(error))

    def generate(
        self, prompts: list[list[int]], params: SamplingParams | Iterable[SamplingParams]
    ) -> list[Completion]:
        """Answer all prompts (token ids) and return when the last is done. For scripts and tests; not to
        be mixed with add() and step(). Raises what add() and step() raise, and RequestFailed."""
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

    def _deliver(self, gained: list[tuple[Sequence, Chosen]]) -> list[RequestOutput]:
        outputs = []
        for sequence, chosen in gained:
            request = self._requests[sequence.request.request_id]
            outputs.append(output := request.advance(chosen))
            if output.finish_reason is not None:
                self._end(request, output.finish_reason)
        return outputs

    def _end(self, request: Request, reason: FinishReason) -> None:
        self.scheduler.finish(request.sequence, reason)
        del self._requests[request.request_id]
        self._update_gauges()

    def _predict_s(self, num_tokens: int) -> float:
        """Seconds of a step, by what was measured of the hardware or, without that, of steps."""
        expected = self.predict(num_tokens, min(num_tokens, self.scheduler.max_num_seqs))
        return self._measured.predict_s(num_tokens) if expected is UNKNOWN else expected.seconds

    def _record(
        self, batch: Batch, outputs: list[RequestOutput], began_s: float, streamed_bytes: int, stall_s: float
    ) -> None:
        """What the step took; the last three are the clock and the streamer's counters before it."""
        num_tokens = batch.num_tokens
        expected = self.predict(num_tokens, batch.num_rows)
        stats = StepStats(
            duration_s=time.perf_counter() - began_s,
            num_tokens=num_tokens,
            num_seqs=len(batch.scheduled),
            num_sampled=sum(len(output.token_ids) for output in outputs),
            num_fast_forwarded=sum(output.num_forced_tokens for output in outputs),
            streamed_bytes=self.streamer.tiers.streamed_bytes - streamed_bytes,
            stall_s=self.streamer.stall_s - stall_s,
            floor_s=expected.floor_s,
            predicted_s=expected.seconds,
        )
        self._measured.record(num_tokens, stats.duration_s)
        self.metrics.record(stats)
        self._update_gauges()

    def _update_gauges(self) -> None:
        metrics, scheduler = self.metrics, self.scheduler
        metrics.num_running, metrics.num_waiting = len(scheduler.running), len(scheduler.waiting)
        metrics.num_preemptions = scheduler.num_preemptions
        manager = scheduler.block_manager
        metrics.prefix_cache_queries = scheduler.num_queried_tokens
        metrics.prefix_cache_hits = scheduler.num_hit_tokens
        metrics.kv_blocks_used = manager.num_blocks - manager.num_free
