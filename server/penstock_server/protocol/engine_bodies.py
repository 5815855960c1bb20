"""The JSON of /v1/plan and /v1/engine/stats, and of the commands that print a plan or the hardware.

The names here, and those of the fields of EngineMetrics, are part of the API.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from penstock.kernel_tuning import KernelTuning
from penstock.metrics import EngineMetrics


class Told(BaseModel):
    """The base of these bodies. A body can also be made of an object that has its fields as attributes."""

    model_config = ConfigDict(from_attributes=True, frozen=True)


class PlacedLayer(Told):
    """The memory that a layer lies in, and whether the compute device keeps the layer. Lower planes that lie
    apart are a layer of their own here, after the one that they belong to. So is the rest of a layer of
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
    """What drafts should bring to a step of so many sequences, if they are right as often
    as is assumed of their source."""

    #: "new_text", "quotation", "draft_model", "eagle3", "mtp" (the head that came with the model) or "planes"
    #: (its upper planes).
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
    #: Its first layer, and the one after its last.
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


@dataclass(kw_only=True)
class StatsBody(EngineMetrics):
    """The answer of /v1/engine/stats: the engine's figures, and what else is of this moment."""

    #: A clock. The rate of a total is its difference between two answers, divided by the clock's difference.
    time_s: float
    #: The layer that is being computed; null if none is.
    current_layer: int | None
    #: null for a model without experts.
    experts: ExpertsBody | None
    #: All machines that compute layers, as they are now; empty where one computes all.
    nodes: tuple[NodeBody, ...]


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


class KernelsBody(Told):
    """The kernels of the processor."""

    #: None: they are not compiled ones.
    build: str | None
    tuning: KernelTuning | None
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
