"""Engine: add requests, step, collect what each gained. Synchronous and single-threaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import EngineConfig
from penstock.engine_parts import EngineParts, LoadOptions, ReportProgress, load_parts, tell_nobody
from penstock.errors import STEP_ERRORS, StepFailed
from penstock.generation.drafting.drafter import Drafter
from penstock.generation.executor import Cancelled
from penstock.generation.requests.generation_request import (
    GenerationRequest,
    PoolingParams,
    SamplingParams,
    ValidRequest,
)
from penstock.generation.requests.request import Completion, RequestOutput
from penstock.generation.scheduling.batch import NOTHING_SCHEDULED
from penstock.generation.sequence import FinishReason
from penstock.generation.step_executor import StepLost
from penstock.loader import ModelSource
from penstock.memory.hardware import HardwareProfile
from penstock.memory.spare_memory import SpareMemory
from penstock.text.prompt_forms import PromptForms
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.nodes.member import NodeStatus
    from penstock.nodes_config import NodesConfig

__all__ = ["Completion", "Engine", "ReportProgress"]


class Engine:
    """A loaded model and everything that is being computed with it. The engine knows no feature: its parts
    are there whatever they do, and observers follow the steps."""

    def __init__(self, parts: EngineParts) -> None:
        """Engine.load() makes the parts from a model's name."""
        self.model, self.plan, self.config = parts.model, parts.plan, parts.config
        self.spec, self.tokenizer = parts.model.spec, parts.model.tokenizer
        self.streamer = parts.model.streamer
        #: The model's own advice (generation_config.json), for callers that build SamplingParams.
        self.default_sampling = parts.model.default_sampling
        #: Tokens of a prompt and its answer; the model's own soft prompt takes what is left.
        self.max_model_len = parts.model.max_text_len
        #: How the model makes vectors or scores; None for a model that writes.
        self.pooling = parts.model.pooling
        #: How the model is asked to complete a text and to fill in blanks.
        self.forms = PromptForms(self.tokenizer, self.spec.has_encoder)
        self.limits, self.requests, self.grammars = parts.limits, parts.requests, parts.grammars
        #: The adapters (LoRA) that requests may have.
        self.adapters = parts.adapters
        self.meter, self.metrics = parts.meter, parts.meter.metrics
        self.scheduler, self.executor, self.chooser = parts.scheduler, parts.executor, parts.chooser
        self.observers = parts.observers
        #: What drafts for this model in addition to the texts.
        self.draft_model = parts.draft_model
        self._nodes, self._closing = parts.nodes, parts.closing

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

        report_progress(loaded, total) is called after each layer that stays in memory, and now and then while
        other machines load theirs; it may raise to end the loading. load() returns when all these layers are
        in memory. If not `is_patient`, it returns at once, and the first step computes each layer as it
        arrives. `tokenizer` replaces the folder's own; a draft model has its own, which is compared with it.
        `hardware` holds measured rates (measure_hardware() of penstock.measure); without it only the free
        memory is looked up, and no token is guessed ahead, since nobody knows what pays. `cache_folder` keeps
        kernels that are compiled for a GPU. `drafter` guesses tokens ahead, in place of what
        config.speculation says: guesses change how many steps an answer takes, and nothing else. `nodes`:
        this is the leader of several machines, each of which computes some of the layers; load() waits for
        them, patient or not. `spare` lends memory of models that left, and takes it back when the engine
        object is gone. Raises kinds of CheckpointError if the files are at fault, and CapacityError if
        something does not fit.
        """
        source = ModelSource(model, offline, revision, tokenizer, cache_folder, spare)
        options = LoadOptions(hardware, drafter, nodes, report_progress or tell_nobody, is_patient)
        return cls(load_parts(source, config or EngineConfig(), options))

    def close(self) -> None:
        """Stop reading, close the files, and free a GPU's memory. Nothing can be computed afterwards. The
        host's memory is freed when the engine object is gone. Keys and values that shall be kept on disk are
        written before, which takes seconds at most."""
        self._closing.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.executor.num_in_flight > 0

    @property
    def nodes(self) -> tuple[NodeStatus, ...]:
        """All machines that compute the model's layers, by rank; () where one computes all. Safe from any
        thread."""
        return self._nodes()

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
        self.look()

    def has_started(self, request_id: str) -> bool:
        """Whether a request has had a place in a step. Safe from any thread, also while a step hangs."""
        return self.requests.has_started(request_id)

    def expire(self, now: float) -> list[RequestOutput]:
        """End the requests whose time is up. Each gets an output with its error, QueueTimeout or
        DeadlineExceeded. `now` is of the same clock as their start_by and finish_by."""
        if expired := self.requests.expire(now):
            self.look()
        return expired

    def step(self, aborted: Set[str] = frozenset()) -> list[RequestOutput]:
        """Compute one sweep. Returns [] if nothing is pending, and, after a moment, if all that is pending
        waits: for keys and values from disk, or for other machines.

        `aborted` may grow while the sweep runs (another thread adds request ids): once all requests of the
        step are in it, the sweep ends between two layers and nothing is delivered. A request that can't
        be computed ends with an `error` in its output. Raises StepFailed if a layer could not be read: the
        step's requests are ended then, and the engine goes on.

        On several machines, several steps are in flight: step() ends the oldest, or returns [] after a
        moment. MachineAway, a StepFailed, then says that a machine has been away for too long.
        """
        try:
            return self._step(aborted) if self.executor.is_able() else []
        except StepFailed as failure:
            self.requests.fail(failure.request_ids)
            raise
        finally:
            self.observers.after(self.scheduler)

    def _step(self, aborted: Set[str]) -> list[RequestOutput]:
        batch = NOTHING_SCHEDULED
        try:
            while self.executor.has_room:
                self.observers.before(self.scheduler)
                if not (batch := self.scheduler.schedule()):
                    break
                self.observers.scheduled(batch)
                self.executor.launch(batch, self.requests.start(batch, aborted))
            step = self.executor.collect()
            if step is None:
                if self.has_work:
                    self.observers.stalled()
                return []
            batch = step.batch
            chosen = self.chooser.choose(step.logits, step.waiting)
        except Cancelled:
            self.executor.drop(batch)
            return []
        except StepLost as lost:
            self.executor.drop(lost.batch)
            raise StepFailed(lost.batch.request_ids, str(lost)) from lost
        except STEP_ERRORS as error:
            self.executor.drop(batch)
            raise StepFailed(batch.request_ids, str(error)) from error
        except BaseException:  # nobody may find K and V in the cache that were never computed
            self.executor.drop(batch)
            raise
        outputs = self.requests.deliver(self.scheduler.update(step.waiting, chosen))
        self.observers.computed(batch, chosen, outputs)
        return outputs

    def look(self) -> None:
        """Notice what has changed without a step, such as machines that were lost, and let the observers
        notice it."""
        self.executor.look()
        self.observers.after(self.scheduler)

    def pool(self, texts: list[list[int]], params: PoolingParams | None = None) -> list[list[float]]:
        """The vector of each text (token ids), or the score of each pair, as [score], of a model that pools.
        For scripts and tests. Raises what add() and step() raise, and RequestFailed."""
        no_tokens, pooling = SamplingParams(max_tokens=0), params or PoolingParams()
        requests = {
            f"pool-{index}": GenerationRequest(text, no_tokens, f"pool-{index}", pooling=pooling)
            for index, text in enumerate(texts)
        }
        found = {output.request_id: list(output.pooled or ()) for output in _answer(self, requests)}
        return [found[request_id] for request_id in requests]

    def generate(
        self, prompts: list[list[int]], params: SamplingParams | Iterable[SamplingParams]
    ) -> list[Completion]:
        """Answer all prompts (token ids) and return when the last answer is complete. For scripts and tests;
        not to be mixed with add() and step(). Raises what add() and step() raise, and RequestFailed."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        requests = {
            f"generate-{index}": GenerationRequest(prompt, own_params, f"generate-{index}")
            for index, (prompt, own_params) in enumerate(zip(prompts, each, strict=True))
        }
        completions = {request_id: Completion() for request_id in requests}
        for output in _answer(self, requests):
            completions[output.request_id].extend(output)
        return list(completions.values())


def _answer(engine: Engine, requests: Mapping[str, GenerationRequest]) -> Iterator[RequestOutput]:
    """All outputs of these requests, by their ids, until all have ended. Raises their errors."""
    try:
        for request in requests.values():
            engine.add(request)
        while engine.has_work:
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                yield output
    finally:
        for request_id in requests:
            engine.abort(request_id)
