"""StepMeter: how long steps take, and how long they should take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from typing import TYPE_CHECKING, NamedTuple

from penstock.generation.chosen import Chosen
from penstock.generation.requests.request import RequestOutput
from penstock.generation.scheduling.batch import Batch
from penstock.generation.scheduling.scheduler import Scheduler
from penstock.generation.step_observer import StepObserver
from penstock.memory.planning.cost import UNKNOWN, MeasuredSteps, Predict
from penstock.memory.planning.plan import MemoryPlan
from penstock.memory.planning.step_work import StepLoad
from penstock.metrics import EngineMetrics, KVSpillStats, StepStats
from penstock.weights.streamer import LayerStreamer

if TYPE_CHECKING:
    from penstock.generation.ram_attention import Past
    from penstock.memory.planning.expert_demand import ExpertDemand
    from penstock.memory.planning.splits_in_ram import SpilledKeys


class StepMark(NamedTuple):
    """When a step began, and the counters then."""

    began_s: float
    streamed_bytes: int
    stall_s: float
    expert_counts: tuple[int, ...]
    spilled_bytes: int
    attended_bytes: int


class StepMeter(StepObserver):
    """Measures each step, and keeps the engine's metrics."""

    def __init__(
        self,
        plan: MemoryPlan,
        streamer: LayerStreamer,
        predict: Predict,
        max_num_seqs: int,
        expected: Callable[[Iterable[Past]], SpilledKeys],
        kv_spill: KVSpillStats | None = None,
    ) -> None:
        """`predict` says how long a step should take by what was measured of the hardware. expected(pasts of
        a step's sequences): LayerCaches.expected(). `kv_spill`: of keys and values that are on disk while
        their sequence runs."""
        from penstock.memory.planning.splits_in_ram import NOTHING_SPILLED

        self.predict = predict
        #: What the steps so far say, for hardware that was not measured.
        self.measured = MeasuredSteps()
        self.metrics = EngineMetrics(
            kv_blocks_total=plan.num_kv_blocks,
            num_resident_layers=streamer.num_resident_layers,
            num_streamed_layers=streamer.num_layers - streamer.num_resident_layers,
            pinned_bytes=streamer.tiers.pinned_bytes,
            unpinned_bytes=streamer.tiers.unpinned_bytes,
            links=streamer.tiers.traffic,
            kv_spill=kv_spill,
        )
        self._streamer = streamer
        self._max_num_seqs = max_num_seqs
        self._known_s: dict[int, float] = {}
        self._expect, self._expected = expected, NOTHING_SPILLED
        self._spill = kv_spill or KVSpillStats()
        self._mark = StepMark(0.0, 0, 0.0, (0, 0, 0, 0), 0, 0)
        #: Of the steps in flight and of those that were given up since the last one ended, the oldest first.
        self._marks = deque[tuple[Batch, StepMark]]()

    def predict_s(self, num_tokens: int) -> float:
        """Seconds of a step, by the rates of the hardware or, where those are unknown, by earlier steps."""
        num_sampled = min(num_tokens, self._max_num_seqs)
        expected = self.predict(StepLoad(num_tokens, num_sampled, 0, None, *self._expected.parts(num_tokens)))
        return self.measured.predict_s(num_tokens) if expected is UNKNOWN else expected.seconds

    def known_s(self, num_tokens: int) -> float:
        """Seconds of a step by the rates of the hardware, all of whose logits are wanted; 0 where the rates
        are unknown."""
        if num_tokens not in self._known_s:
            found = self.predict(StepLoad(num_tokens, num_tokens, 0, None, *self._expected.parts(num_tokens)))
            self._known_s[num_tokens] = found.seconds
        return self._known_s[num_tokens]

    def prompt_s(self, num_tokens: int, max_tokens: int) -> float:
        """Seconds that a prompt takes alone, in steps of at most `max_tokens`; 0 where the rates are
        unknown."""
        num_whole, rest = divmod(num_tokens, max_tokens)
        whole_s = self.predict(StepLoad(max_tokens, 1)).seconds if num_whole else 0.0
        return num_whole * whole_s + (self.predict(StepLoad(rest, 1)).seconds if rest else 0.0)

    def before(self, scheduler: Scheduler) -> None:
        tiers, spill = self._streamer.tiers, self._spill
        self._mark = StepMark(
            time.perf_counter(),
            tiers.streamed_bytes,
            self._waited_s(),
            tiers.expert_counts,
            spill.num_moved_bytes,
            spill.attended_bytes,
        )
        running = scheduler.admission.running
        spilled = self._expect((each.block_table, each.num_computed_tokens) for each in running)
        if spilled != self._expected:
            self._known_s.clear()
            self._expected = spilled

    def scheduled(self, batch: Batch) -> None:
        self._marks.append((batch, self._mark))

    def computed(self, batch: Batch, chosen: List[Chosen], outputs: List[RequestOutput]) -> None:
        of, mark = self._marks.popleft()
        while of is not batch:  # that one was given up
            of, mark = self._marks.popleft()
        num_tokens, num_encoded = batch.num_tokens, batch.num_encoded
        spilled = self._spill.num_moved_bytes - mark.spilled_bytes
        attended = self._spill.attended_bytes - mark.attended_bytes
        load = StepLoad(num_tokens, batch.num_rows, num_encoded, None, spilled, attended)
        load = load._replace(num_paths=batch.num_paths)
        expected, demand = self.predict(load), self._demand(mark)
        floor = self.predict(load._replace(demand=demand)) if demand.num_asked else expected
        chains = [choice for choice in chosen if choice.num_drafts]
        for chain in chains:
            self.metrics.record_chain(chain.num_right)
        stats = StepStats(
            duration_s=time.perf_counter() - mark.began_s,
            num_tokens=num_tokens,
            num_seqs=len(batch.scheduled),
            num_sampled=sum(len(each.token_ids) for output in outputs for each in (output, *output.others)),
            num_fast_forwarded=sum(output.num_forced_tokens for output in outputs),
            num_drafts=sum(chain.num_drafts for chain in chains),
            num_right_drafts=sum(chain.num_right for chain in chains),
            streamed_bytes=self._streamer.tiers.streamed_bytes - mark.streamed_bytes,
            stall_s=self._waited_s() - mark.stall_s,
            floor_s=floor.floor_s,
            predicted_s=expected.seconds,
            num_experts=int(demand.num_asked),
            num_expert_hits=int(demand.num_asked - demand.num_missing),
            spilled_bytes=spilled,
        )
        self.metrics.expert_queries += stats.num_experts
        self.metrics.expert_hits += stats.num_expert_hits
        if not num_encoded:  # the time of an encoder's sweep says nothing about other steps
            self.measured.record(num_tokens, stats.duration_s)
        self.metrics.record(stats)

    def _waited_s(self) -> float:
        """Seconds in which computing waited for weights, and for keys and values."""
        return self._streamer.lane.link.stall_s + self._spill.wait_s

    def _demand(self, mark: StepMark) -> ExpertDemand:
        """The experts that the step has asked for."""
        from penstock.memory.planning.expert_demand import ExpertDemand

        counts = self._streamer.tiers.expert_counts
        return ExpertDemand(*(now - before for now, before in zip(counts, mark.expert_counts, strict=True)))

    def after(self, scheduler: Scheduler) -> None:
        """Note how many requests run and wait, and how full the KV cache is."""
        metrics, admission, manager = self.metrics, scheduler.admission, scheduler.block_manager
        metrics.num_running, metrics.num_waiting = len(admission.running), len(admission.waiting)
        metrics.num_preemptions = admission.num_preemptions
        metrics.prefix_cache_queries = admission.num_queried_tokens
        metrics.prefix_cache_hits = admission.num_hit_tokens
        metrics.kv_blocks_used = manager.num_blocks - manager.pool.num_free
