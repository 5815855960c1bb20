"""The JSON of /v1/plan and /v1/engine/stats, and of the commands that print a plan or the hardware.

The names here are part of the API: they stay when the engine renames its own attributes.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Told(BaseModel):
    """The base of these bodies. A body can also be made of an object that has its fields as attributes."""

    model_config = ConfigDict(from_attributes=True, frozen=True)


class PlacedLayer(Told):
    """The memory that a layer lies in, and whether the compute device keeps the layer. Lower planes that lie
    apart are a layer of their own here, behind the one that they belong to. So is the rest of a layer of
    which a card keeps a share."""

    home: Literal["device", "host", "disk"]
    is_resident: bool
    num_bytes: int
    is_lower: bool


class PlanBody(Told):
    """The memory plan: what lies in which memory, in allocated bytes."""

    layers: tuple[PlacedLayer, ...]
    #: The embedding lies on the host, which looks up its rows.
    embedding_bytes: int
    #: The head lies on the compute device.
    head_bytes: int
    #: Staging slots on the compute device, and slots on the host for layers on the way from disk to a GPU.
    num_staging_slots: int
    num_host_slots: int
    staging_slot_bytes: int
    #: Experts that have room on the compute device, and on the host on the way to a GPU.
    num_expert_slots: int
    num_host_expert_slots: int
    expert_slot_bytes: int
    block_size: int
    num_kv_blocks: int
    kv_bytes: int
    workspace_bytes: int
    is_workspace_measured: bool
    has_gpu: bool
    host_budget_bytes: int
    #: 0 without a GPU.
    device_budget_bytes: int
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    host_used_bytes: int
    device_used_bytes: int
    #: Bytes that each step reads.
    streamed_bytes: int
    num_resident_layers: int
    #: A prompt is swept through the first so many layers once: those of an encoder, and then the projections
    #: that make the prompt's keys and values for the decoder's cross-attention.
    num_encoder_layers: int
    #: How many of these are such projections.
    num_cross_layers: int
    num_kv_tokens: int
    #: Recurrent states: their bytes, how many there are, and how many of their sequences run at a time. 0 for
    #: models without.
    state_bytes: int
    num_state_slots: int
    num_state_sequences: int
    #: Memory for adapters (LoRA), on the host.
    adapter_bytes: int
    #: A card and the processor share the products, and the card keeps this share of each matrix. null: they
    #: do not.
    kept_share: float | None
    #: The processor computes experts that lie in RAM, at once with a card.
    shares_experts: bool
    #: Tokens of num_kv_tokens whose keys and values lie on disk (--kv-spill), or on the host beside a GPU
    #: (--kv-spill-memory), beside kv_bytes.
    num_spilled_tokens: int
    #: Memory of the host for these; 0: they lie on disk, or there are none.
    kv_spill_bytes: int
    #: The share of these to which the processor attends where they lie, in steps with few tokens. 0 where no
    #: such step is faster by it.
    attended_share: float
    #: Memory of the host for keys and values that have left a GPU's (--kv-host-memory).
    kv_host_bytes: int


class ExpertDemandBody(Told):
    """The experts that a predicted step asks for, in all layers together."""

    num_asked: float
    #: Those that are not where they are computed, and those that have to come from the disk.
    num_missing: float
    num_from_disk: float
    #: Those that the processor computes where they lie, beside a card.
    num_in_ram: float
    #: The share of the asked-for experts that are where they are computed; 1 for a model without experts.
    hit_rate: float


class StepBody(Told):
    """A predicted step: it computes `num_tokens` tokens, and samples after `num_sampled` of them."""

    num_tokens: int
    num_sampled: int
    #: Tokens of prompts that an encoder reads in the step.
    num_encoded: int
    #: Link or unit -> the seconds for which the step keeps it busy.
    terms: dict[str, float]
    seconds: float
    #: The seconds that the products take.
    products_s: float
    #: The link or unit that limits the step. "experts": the experts of a layer are read only after
    #: its router has chosen them.
    binding: str
    experts: ExpertDemandBody
    #: The share of the layers' weights that the processor multiplies beside a card.
    processor_share: float


class DraftingBody(Told):
    """What guesses of the next tokens should bring to a step of so many sequences, if they are right as often
    as is assumed of their source."""

    #: "new_text", "quotation", "draft_model", "eagle3", "mtp" (the head that came with the model), "planes"
    #: (its upper planes), or "two_levels" (a draft model before the planes).
    source: str
    num_seqs: int
    #: Guesses of each sequence; 0 where none pays. Levels of a draft model's or head's trees.
    num_guesses: int
    num_levels: int
    #: Tokens that each sequence gains in a step; 1 without guesses.
    num_gained: float
    #: The step's seconds, those of them in which a draft model guesses, and the seconds without guesses.
    seconds: float
    drafting_s: float
    plain_s: float
    tokens_per_s: float
    plain_tokens_per_s: float


class NodeBody(Told):
    """A machine that computes some of the layers (--nodes)."""

    #: 0 is the one that answers here.
    rank: int
    #: "" for rank 0.
    address: str
    #: "away" (lost, or not there yet), "here", "loading", "ready", or "failed", which `reason` explains.
    state: str
    reason: str
    #: Its first layer, and the one behind its last.
    layers: tuple[int, int]
    #: Layers that stay in its memory, those that are loaded so far, and bytes of its plan and its budget.
    num_resident: int
    num_loaded: int
    used_bytes: int
    budget_bytes: int
    #: False: another processor or other kernels than the leader's, so that the last bits of numbers may
    #: differ from one machine's.
    rounds_alike: bool
    #: Steps that it computed, the seconds in which it computed them, and how often it was lost.
    num_steps: int
    busy_s: float
    num_losses: int
    #: Seconds for which it has been away; null if it is not.
    away_s: float | None
    #: Seconds that a step of one token should take there; 0 if that is unknown.
    step_s: float


class ServedPlanBody(PlanBody):
    """The answer of /v1/plan."""

    #: The prediction for a step of one token.
    step: StepBody
    #: Whose code computes the layers: "penstock" or "transformers".
    model_impl: str
    #: Whether a request gets the same bits in any company.
    is_batch_invariant: bool
    #: Host memory that a draft model takes beside this plan; 0 without one.
    draft_model_bytes: int
    #: A GPU's memory that it takes there.
    draft_model_device_bytes: int
    #: Empty where no step's time is known, and where nothing is guessed.
    drafting: tuple[DraftingBody, ...]
    #: All machines that compute layers, by rank; empty where one computes all. This plan is of the layers of
    #: rank 0.
    nodes: tuple[NodeBody, ...]


class LastStep(Told):
    """The figures of the last step."""

    duration_s: float
    num_tokens: int
    num_seqs: int
    num_sampled: int
    #: Bytes of weights that came to the compute device for the step.
    streamed_bytes: int
    #: Seconds for which the step waited for layers.
    stall_s: float
    #: The least seconds that the measured rates allow, and the predicted seconds; 0 if no rates are known.
    floor_s: float
    predicted_s: float
    num_fast_forwarded: int
    #: Guesses of next tokens, and those that were right.
    num_drafts: int
    num_right_drafts: int
    #: Experts that layers asked for, and those that were there.
    num_experts: int
    num_expert_hits: int
    #: Bytes of keys and values that came from the disk (--kv-spill) or, for a GPU, from the host's memory
    #: (--kv-spill-memory), and that went there.
    spilled_bytes: int


class LinkTraffic(Told):
    """The bytes that went over a link since the start, and the seconds for which the link was busy."""

    num_bytes: int
    busy_s: float


class HotExpert(Told):
    """One of the experts that were used most."""

    #: The layer is counted over all stacks.
    layer: int
    expert: int
    #: The share of the steps that asked for the expert, by the experts that a token passes through.
    share: float


class ExpertsBody(Told):
    """The experts of a mixture, where they are computed."""

    num_slots: int
    #: Of the experts in slots, those that stay whatever else is asked for.
    num_pinned: int
    #: For each layer, its experts, those of them that are in slots, and those that came since the start.
    num_experts: list[int]
    in_slots: list[int]
    num_arrived: list[int]
    #: The most used ones, the most used first.
    hot: list[HotExpert]


class PreemptionsBody(Told):
    """What became of preempted sequences since the start: those whose keys and values were moved, and those
    whose tokens were computed again; the tokens that came back, the seconds that computing them would have
    taken longer, and those for which blocks had to be written first."""

    num_moved: int
    num_recomputed: int
    moved_tokens: int
    saved_s: float
    write_s: float


class KVDiskReadsBody(Told):
    """What came from a tier for sequences that waited: blocks, whole recurrent states, the tokens that were
    not computed therefore, the seconds that it took, and those that computing would have taken longer (0:
    unknown)."""

    num_blocks: int
    num_states: int
    num_tokens: int
    read_s: float
    saved_s: float


class KVDiskBody(Told):
    """Keys and values on disk (--kv-disk), or on the host (--kv-host-memory): what lies there, and what
    became of blocks since the start."""

    limit_bytes: int
    num_bytes: int
    num_blocks: int
    #: False: another process writes, and this one only reads.
    is_writer: bool
    written_blocks: int
    written_bytes: int
    #: Blocks that were taken for other tokens before they were written, that the disk could not take, and
    #: that were not as they had been written.
    missed_blocks: int
    failed_writes: int
    corrupt_blocks: int
    read_bytes: int
    reads: KVDiskReadsBody


class KVEventsBody(Told):
    """Batches of events for routers (--kv-events-config) since the start: those that were sent, their bytes,
    and those that were lost since too many waited."""

    sent_batches: int
    sent_bytes: int
    dropped_batches: int


class KVSpillBody(Told):
    """Keys and values of sequences that are longer than the KV cache (--kv-spill, or --kv-spill-memory on a
    GPU): blocks that lie on disk, or on the host, and their bytes; what went there and came from there since
    the start, and what the processor attended to there beside a GPU; and the seconds in which layers waited,
    which are among a GPU's stalls."""

    num_blocks: int
    num_bytes: int
    read_bytes: int
    written_bytes: int
    attended_bytes: int
    wait_s: float


class StatsBody(Told):
    """The answer of /v1/engine/stats: totals since the start, and the present state."""

    #: A clock. The rate of a total is its difference between two answers, divided by the clock's difference.
    time_s: float
    #: The layer that is being computed; null if none is.
    current_layer: int | None
    num_steps: int
    step_seconds: float
    stall_seconds: float
    floor_seconds: float
    predicted_seconds: float
    streamed_bytes: int
    prompt_tokens: int
    generated_tokens: int
    fast_forwarded_tokens: int
    #: Guesses of next tokens, those that were right, the chains of guesses, and the chains that were right
    #: at each of the first places.
    draft_tokens: int
    accepted_tokens: int
    draft_chains: int
    accepted_by_place: list[int]
    prefix_cache_queries: int
    prefix_cache_hits: int
    #: Experts that layers asked for, and those that were in memory already.
    expert_queries: int
    expert_hits: int
    num_preemptions: int
    preemptions: PreemptionsBody
    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    num_resident_layers: int
    num_streamed_layers: int
    pinned_bytes: int
    unpinned_bytes: int
    last_step: LastStep | None
    #: None for a model without experts.
    experts: ExpertsBody | None
    #: The traffic of each link, by the link's name.
    links: dict[str, LinkTraffic]
    #: None without --kv-disk.
    kv_disk: KVDiskBody | None
    #: None without --kv-host-memory, which is for a GPU.
    kv_host: KVDiskBody | None
    #: All machines that compute layers, as they are now; empty where one computes all.
    nodes: tuple[NodeBody, ...]
    #: None where all blocks of the KV cache are in memory.
    kv_spill: KVSpillBody | None
    #: None without events for routers.
    kv_events: KVEventsBody | None
    step_tokens: int
    steps_by_tokens: list[int]


class DiskBody(Told):
    """The read rate of the file system under a model, and the size and number of reads that reach it."""

    read_gbps: float
    block_bytes: int
    depth: int
    is_direct: bool


class DeviceBody(Told):
    """A GPU and the link that feeds it."""

    name: str
    compute_capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    memory_gbps: float
    host_to_device_gbps: float
    int8_gops: float
    pinnable_bytes: int
    crossing_s: float
    launch_s: float


class TuningBody(Told):
    prefetch_bytes: int
    prefetch_bytes_int4: int
    few_rows: int
    panel_inputs: int
    lane_rows: int
    read_threads: int


class KernelsBody(Told):
    """The kernels of the processor."""

    #: None: they are not compiled ones.
    build: str | None
    tuning: TuningBody | None
    #: The share of the cores that other work took while the tuning was measured.
    others_share: float | None


class HardwareBody(Told):
    """Capacities in bytes; rates in 1e9 bytes (or operations) a second, measured."""

    num_cores: int
    ram_bytes: int
    free_ram_bytes: int
    memory_read_gbps: float
    int8_gops: float
    disk: DiskBody | None
    #: The disk of --kv-spill; null where it is the same one.
    spill_disk: DiskBody | None
    device: DeviceBody | None
    #: (rows, 1e9 bytes of weights a second) of products.
    products: tuple[tuple[int, float], ...]
    #: When the oldest of the kept rates was measured, in seconds since 1970; None: every rate is new.
    kept_since_s: float | None
    kernels: KernelsBody | None
    #: The largest share of the cores that other work took while a rate was measured; None: not known.
    others_share: float | None


def told(kind: type[BaseModel], value: object, **computed: Any) -> dict[str, Any]:
    """The fields of `kind`: those in `computed`, and all others from the attributes of `value`."""
    return {name: getattr(value, name) for name in kind.model_fields if name not in computed} | computed
