"""The engine's figures: StepStats (one step) and EngineMetrics (totals since the start, and the state now).

A field is told here alone: /v1/engine/stats has it under its name, and /metrics under those that counter()
and gauge() give. The end of a name is its unit (`_s`, `_seconds`, `_bytes`); a count has none.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

#: Bounds of the histogram of tokens per step; vLLM's buckets.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

#: Places of a chain of guesses that are counted apart.
NUM_PLACES = 8


class Series(NamedTuple):
    """A series of Prometheus'. help: for people. is_total: it only grows."""

    name: str
    help: str
    is_total: bool


def counter(name: str, help: str, default: Any = 0, *, twin: tuple[str, str] | None = None) -> Any:
    """A field that only grows, and its series. twin: name and help of a second series with the same number.
    Names may have words in braces, which within() gives."""
    told = [Series(*each, True) for each in ((name, help), twin) if each is not None]
    return field(default=default, metadata={"series": told})


def gauge(name: str, help: str, default: Any = 0) -> Any:
    """A field that grows and shrinks, and its series."""
    return field(default=default, metadata={"series": [Series(name, help, False)]})


def within(**words: str) -> Any:
    """A field with figures of its own, or None. words: those in the names of their series."""
    return field(default=None, metadata={"words": words})


def series_of(figures: object, words: dict[str, str] | None = None) -> Iterator[tuple[Series, float]]:
    """The series of a dataclass's fields, with their numbers. Parts that are None have none."""
    assert is_dataclass(figures)
    for each in fields(figures):
        value = getattr(figures, each.name)
        for name, help, is_total in each.metadata.get("series", ()):
            yield Series(name.format_map(words or {}), help.format_map(words or {}), is_total), value
        if is_dataclass(value):
            yield from series_of(value, each.metadata.get("words") or words)


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
    num_states: int = counter("penstock:kv_{tier}_read_states", "Recurrent states that came from there")
    #: Tokens that were not computed therefore.
    num_tokens: int = 0
    #: 0 where the rates of the machine are unknown.
    read_s: float = counter(
        "penstock:kv_{tier}_read_seconds", "Seconds in which sequences waited for them", 0.0
    )
    saved_s: float = counter(
        "penstock:kv_{tier}_saved_seconds", "Seconds that computing would have taken longer", 0.0
    )


@dataclass
class Preemptions:
    """What became of preempted sequences since the start."""

    #: Those whose tokens are kept, by what was decided at the preemption, and those that compute all or most
    #: of their tokens again.
    num_moved: int = 0
    num_recomputed: int = 0
    moved_tokens: int = counter(
        "penstock:preemption_moved_tokens", "Tokens of preempted sequences that came back"
    )
    saved_s: float = counter(
        "penstock:preemption_saved_seconds", "Seconds that computing them would have taken longer", 0.0
    )
    #: Blocks stay where they are until then.
    write_s: float = counter(
        "penstock:preemption_write_seconds", "Seconds in which blocks waited for their writing", 0.0
    )


@dataclass
class KVDiskStats:
    """What lies in a tier of keys and values, on disk (--kv-disk) or on the host (--kv-host-memory), and what
    became of blocks since the start. Each number has one thread that writes it."""

    #: Of all models in a folder together.
    limit_bytes: int = gauge("penstock:kv_{tier}_limit_bytes", "The most that may lie {place}")
    num_bytes: int = gauge("penstock:kv_{tier}_bytes", "Keys and values of this model {place}")
    num_blocks: int = 0
    #: False: another process writes, and this one only reads.
    is_writer: bool = False
    written_blocks: int = 0
    written_bytes: int = counter("penstock:kv_{tier}_written_bytes", "Keys and values that went there")
    #: They were taken for other tokens.
    missed_blocks: int = counter(
        "penstock:kv_{tier}_missed_blocks", "Blocks overwritten before they were there"
    )
    failed_writes: int = counter("penstock:kv_{tier}_failed_writes", "Blocks that were not taken")
    #: They were not as they had been written.
    corrupt_blocks: int = counter("penstock:kv_{tier}_damaged_blocks", "Blocks that were not whole")
    read_bytes: int = counter("penstock:kv_{tier}_read_bytes", "Keys and values that came from there")
    reads: KVDiskReads = field(default_factory=KVDiskReads)


@dataclass
class KVEventStats:
    """Batches of events for routers (--kv-events-config) since the start."""

    sent_batches: int = counter("penstock:kv_events_sent_batches", "Batches of events sent to routers")
    sent_bytes: int = counter("penstock:kv_events_sent_bytes", "Bytes of these batches")
    #: Those that could not be sent are lost, too.
    dropped_batches: int = counter(
        "penstock:kv_events_dropped_batches", "Batches of events lost since too many waited"
    )


@dataclass
class KVSpillStats:
    """Blocks of sequences that are longer than the KV cache's memory (--kv-spill, --kv-spill-memory), and
    what went to and from the file, or the host's memory beside a GPU, since the start."""

    num_blocks: int = 0
    num_bytes: int = gauge("penstock:kv_spill_bytes", "Keys and values beyond the memory")
    read_bytes: int = counter(
        "penstock:kv_spill_read_bytes", "Keys and values that steps read from disk, or copied to a GPU"
    )
    written_bytes: int = counter(
        "penstock:kv_spill_written_bytes", "Keys and values that steps wrote to disk, or copied back"
    )
    attended_bytes: int = counter(
        "penstock:kv_spill_attended_bytes",
        "Keys and values on the host that the processor attended to in place of a GPU",
    )
    #: On a GPU these are among the link's stalls.
    wait_s: float = counter(
        "penstock:kv_spill_wait_seconds", "Seconds in which layers waited for keys and values", 0.0
    )

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

    num_steps: int = counter("penstock:steps", "Sweeps of the weights")
    step_seconds: float = counter("penstock:step_seconds", "Seconds in steps", 0.0)
    stall_seconds: float = counter("penstock:stall_seconds", "Seconds waiting for layers", 0.0)
    floor_seconds: float = counter(
        "penstock:floor_seconds", "Least seconds that steps could take, by measured rates", 0.0
    )
    predicted_seconds: float = counter("penstock:predicted_seconds", "Seconds that the plan expected", 0.0)
    streamed_bytes: int = counter(
        "penstock:streamed_bytes", "Bytes of weights read because a step needed them"
    )
    prompt_tokens: int = counter(
        "vllm:prompt_tokens", "Prompt tokens, including those that were found in the cache"
    )
    generated_tokens: int = counter("vllm:generation_tokens", "Tokens generated")
    fast_forwarded_tokens: int = counter(
        "penstock:fast_forwarded_tokens",
        "Generated tokens that a grammar forced, without a step of their own",
    )
    draft_tokens: int = counter("vllm:spec_decode_num_draft_tokens", "Guessed tokens")
    accepted_tokens: int = counter("vllm:spec_decode_num_accepted_tokens", "Guessed tokens that were right")
    draft_chains: int = counter("vllm:spec_decode_num_drafts", "Trees of guessed tokens")
    #: The chains that were right at each of the first places.
    accepted_by_place: list[int] = field(default_factory=lambda: [0] * NUM_PLACES)
    prefix_cache_queries: int = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache")
    prefix_cache_hits: int = counter(
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the cache",
        twin=("vllm:prompt_tokens_cached", "Prompt tokens not computed again"),
    )
    #: Each expert once in a layer and step.
    expert_queries: int = counter("penstock:expert_queries", "Experts that layers asked for")
    expert_hits: int = counter("penstock:expert_hits", "Experts that were in memory when asked for")
    num_preemptions: int = counter("vllm:num_preemptions", "Sequences preempted")
    num_running: int = gauge("vllm:num_requests_running", "Sequences in the batch")
    num_waiting: int = gauge("vllm:num_requests_waiting", "Sequences waiting")
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    num_resident_layers: int = gauge("penstock:resident_layers", "Layers kept in memory")
    num_streamed_layers: int = gauge("penstock:streamed_layers", "Layers read in each step")
    pinned_bytes: int = gauge("penstock:pinned_bytes", "Memory pinned to feed a GPU")
    unpinned_bytes: int = gauge("penstock:unpinned_bytes", "Memory that could not be pinned")
    last_step: StepStats | None = None
    #: What went over each link, by the name of the link.
    links: dict[str, Traffic] = field(default_factory=dict)
    preemptions: Preemptions = field(default_factory=Preemptions)
    #: None where keys and values are not kept on disk.
    kv_disk: KVDiskStats | None = within(tier="disk", place="on disk")
    #: None where no blocks of a card are kept on the host.
    kv_host: KVDiskStats | None = within(tier="host", place="on the host")
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
