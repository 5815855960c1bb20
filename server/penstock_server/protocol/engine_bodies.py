"""What operators are told of the engine: the plan, how long a step should take, totals, the hardware. It is
the JSON of /v1/plan and /v1/engine/stats, and of the commands that print the same.

The names are part of the API: they stay when the engine calls the same thing otherwise.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Told(BaseModel):
    """Also from an object with such attributes."""

    model_config = ConfigDict(from_attributes=True, frozen=True)


class PlacedLayer(Told):
    """Where a layer's bytes wait, and whether the compute device keeps them."""

    home: Literal["device", "host", "disk"]
    is_resident: bool
    num_bytes: int


class PlanBody(Told):
    """What lies where, in bytes that are allocated."""

    layers: tuple[PlacedLayer, ...]
    #: On the host: it is looked up row by row.
    embedding_bytes: int
    #: On the compute device.
    head_bytes: int
    #: On the compute device; and on the host, where layers pass from disk to a GPU.
    num_staging_slots: int
    num_host_slots: int
    staging_slot_bytes: int
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
    #: Per step.
    streamed_bytes: int
    num_resident_layers: int
    num_kv_tokens: int


class StepBody(Told):
    """A step of `num_tokens` tokens, of which `num_sampled` are sampled."""

    num_tokens: int
    num_sampled: int
    #: Link or unit -> seconds that it is busy.
    terms: dict[str, float]
    seconds: float
    #: What its products take.
    products_s: float
    #: What the step waits for.
    binding: str


class ServedPlanBody(PlanBody):
    """The answer of /v1/plan."""

    #: Of one token.
    step: StepBody


class LastStep(Told):
    """What the last step did."""

    duration_s: float
    num_tokens: int
    num_seqs: int
    num_sampled: int
    #: Bytes of weights read from disk for it.
    streamed_bytes: int
    #: Seconds in which it waited for a layer to arrive.
    stall_s: float
    #: What the measured rates allow at best, and what the plan predicts; 0 where nothing was measured.
    floor_s: float
    predicted_s: float
    num_fast_forwarded: int


class LinkTraffic(Told):
    """Bytes that went over a link since the start, and the seconds in which it was busy with them."""

    num_bytes: int
    busy_s: float


class StatsBody(Told):
    """The answer of /v1/engine/stats: totals since the start, and how things stand now."""

    #: A clock: differences of two answers over its difference are rates.
    time_s: float
    #: The layer that is being computed; null: none.
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
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    num_resident_layers: int
    num_streamed_layers: int
    pinned_bytes: int
    unpinned_bytes: int
    last_step: LastStep | None
    #: By name.
    links: dict[str, LinkTraffic]
    step_tokens: int
    steps_by_tokens: list[int]


class DiskBody(Told):
    """How fast the file system under a model delivers, and how it has to be asked."""

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


class HardwareBody(Told):
    """Capacities in bytes; rates in 1e9 bytes (or operations) a second, measured."""

    num_cores: int
    ram_bytes: int
    free_ram_bytes: int
    memory_read_gbps: float
    int8_gops: float
    disk: DiskBody | None
    device: DeviceBody | None
    #: (rows, 1e9 bytes of weights a second) of products.
    products: tuple[tuple[int, float], ...]


def told(kind: type[BaseModel], value: object, **computed: Any) -> dict[str, Any]:
    """The fields of `kind` that `value` has as attributes, beside those that are `computed`."""
    return {name: getattr(value, name) for name in kind.model_fields if name not in computed} | computed
