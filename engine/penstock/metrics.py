"""StepStats (one step) and EngineMetrics (totals since the start). No exporter: the server has that."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

#: Bounds of the histogram of tokens per step; vLLM's buckets.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

#: Places of a chain of guesses that are counted apart.
NUM_PLACES = 8


@dataclass
class Traffic:
    """Bytes that went over a link since the start, and the seconds in which the link was busy."""

    num_bytes: int = 0
    busy_s: float = 0.0


@dataclass
class KVDiskReads:
    """What came from disk for sequences that waited, since the start."""

    num_blocks: int = 0
    #: Recurrent states that came as wholes.
    num_states: int = 0
    #: Tokens that were not computed therefore.
    num_tokens: int = 0
    #: Seconds in which sequences waited, and those that computing would have taken longer; 0 where the rates
    #: of the machine are unknown.
    read_s: float = 0.0
    saved_s: float = 0.0


@dataclass
class Preemptions:
    """What became of preempted sequences since the start."""

    #: Those whose tokens are kept, by what was decided at the preemption, and those that compute all or most
    #: of their tokens again.
    num_moved: int = 0
    num_recomputed: int = 0
    #: Tokens that came back, and the seconds that computing them would have taken longer.
    moved_tokens: int = 0
    saved_s: float = 0.0
    #: Seconds for which blocks stayed where they were until they were written.
    write_s: float = 0.0


@dataclass
class KVDiskStats:
    """What became of keys and values on disk since the start. Each number has one thread that writes it."""

    #: The most bytes of blocks, of all models in the folder together, and those of this model.
    limit_bytes: int = 0
    num_bytes: int = 0
    num_blocks: int = 0
    #: False: another process writes, and this one only reads.
    is_writer: bool = False
    written_blocks: int = 0
    written_bytes: int = 0
    #: Blocks that were taken for other tokens before they were written.
    missed_blocks: int = 0
    #: Blocks that the disk could not take, and those that were not as they had been written.
    failed_writes: int = 0
    corrupt_blocks: int = 0
    #: Bytes that were read and whole.
    read_bytes: int = 0
    reads: KVDiskReads = field(default_factory=KVDiskReads)


@dataclass
class KVEventStats:
    """Batches of events for routers (--kv-events-config) since the start: those that were sent, their bytes,
    and those that were lost, since too many waited or since they could not be sent."""

    sent_batches: int = 0
    sent_bytes: int = 0
    dropped_batches: int = 0


@dataclass
class KVSpillStats:
    """Blocks of sequences that are longer than the KV cache's memory (--kv-spill, --kv-spill-memory), and
    what went to and from the file, or the host's memory beside a GPU, since the start."""

    num_blocks: int = 0
    num_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    #: Bytes to which the processor attended in the host's memory.
    attended_bytes: int = 0
    #: Seconds in which layers waited for their blocks; on a GPU these are among the link's stalls.
    wait_s: float = 0.0

    @property
    def num_moved_bytes(self) -> int:
        """Bytes in both directions."""
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True)
class StepStats:
    """What one step did."""

    duration_s: float
    num_tokens: int
    num_seqs: int
    num_sampled: int
    #: Bytes of weights that came to where layers are computed for this step: from the disk to RAM or, with a
    #: GPU, over the link to the card.
    streamed_bytes: int
    #: Seconds in which the sweep waited for a layer, or its keys and values, to arrive.
    stall_s: float
    #: Seconds that the measured rates of disk, links, memory and arithmetic allow at best, and seconds that
    #: the plan predicts; 0 where nothing was measured.
    floor_s: float = 0.0
    predicted_s: float = 0.0
    #: The tokens of num_sampled that a grammar forced: they took no step of their own.
    num_fast_forwarded: int = 0
    #: Guesses of next tokens, and those that were right.
    num_drafts: int = 0
    num_right_drafts: int = 0
    #: Experts that layers asked for, each once in a layer, and those that were where they are computed.
    num_experts: int = 0
    num_expert_hits: int = 0
    #: Bytes of keys and values that were read from the spill file, and written to it.
    spilled_bytes: int = 0


@dataclass
class EngineMetrics:
    """Totals since the start, and the present state. Only the engine thread writes them. A reader on another
    thread sees each number whole, but numbers may belong to different steps."""

    num_steps: int = 0
    step_seconds: float = 0.0
    stall_seconds: float = 0.0
    floor_seconds: float = 0.0
    predicted_seconds: float = 0.0
    streamed_bytes: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    fast_forwarded_tokens: int = 0
    #: Guesses of next tokens, those that were right, and how many chains of guesses there were.
    draft_tokens: int = 0
    accepted_tokens: int = 0
    draft_chains: int = 0
    #: The chains that were right at each of the first places.
    accepted_by_place: list[int] = field(default_factory=lambda: [0] * NUM_PLACES)
    #: Prompt tokens that were looked up in the prefix cache, and those that were found there.
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    #: Experts that layers asked for, each once in a layer and step, and those that were in memory already.
    expert_queries: int = 0
    expert_hits: int = 0
    num_preemptions: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    num_resident_layers: int = 0
    num_streamed_layers: int = 0
    #: Bytes of the host memory that feeds a GPU: those that are pinned, and those that could not be pinned.
    pinned_bytes: int = 0
    unpinned_bytes: int = 0
    last_step: StepStats | None = None
    #: What went over each link, by the name of the link.
    links: dict[str, Traffic] = field(default_factory=dict)
    preemptions: Preemptions = field(default_factory=Preemptions)
    #: None where keys and values are not kept on disk.
    kv_disk: KVDiskStats | None = None
    #: None where no blocks of a card are kept on the host.
    kv_host: KVDiskStats | None = None
    #: None where all blocks of the KV cache are in memory.
    kv_spill: KVSpillStats | None = None
    #: None without events for routers.
    kv_events: KVEventStats | None = None
    #: Tokens of all steps together.
    step_tokens: int = 0
    #: A histogram: steps whose tokens are at most STEP_TOKENS[i] and more than STEP_TOKENS[i - 1]. The last
    #: count is of steps with more tokens than all bounds.
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))

    def record(self, step: StepStats) -> None:
        self.last_step = step
        self.num_steps += 1
        self.step_seconds += step.duration_s
        self.stall_seconds += step.stall_s
        self.floor_seconds += step.floor_s
        self.predicted_seconds += step.predicted_s
        self.streamed_bytes += step.streamed_bytes
        self.generated_tokens += step.num_sampled
        self.fast_forwarded_tokens += step.num_fast_forwarded
        self.draft_tokens += step.num_drafts
        self.accepted_tokens += step.num_right_drafts
        self.step_tokens += step.num_tokens
        self.steps_by_tokens[bisect.bisect_left(STEP_TOKENS, step.num_tokens)] += 1

    def record_chain(self, num_right: int) -> None:
        """Of a tree of guesses a path of `num_right` was right."""
        self.draft_chains += 1
        for place in range(min(num_right, NUM_PLACES)):
            self.accepted_by_place[place] += 1
