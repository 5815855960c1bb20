"""StepPrediction: how long a step takes by a plan. Pure.

A step reads every weight once, streams what is not resident, and multiplies. An encoder's weights take part
only in a step that encodes a prompt. At best these three overlap
wholly: the floor that physics sets is max(bytes / rate of each link, bytes of weights / rate of the memory,
operations / rate). The prediction is what to expect: links still overlap with computing, but a product takes
as long as products with this number of rows were measured to take, and the rest of a layer takes time of its
own.

Experts that are missing can't be read before their layer's router has chosen them, so that their reading
overlaps with the products of the layer's experts alone. The seconds of this order are the term "experts":
all other weights / rate of the memory, and then the missing experts / rate of the disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from penstock.config import EngineConfig
from penstock.memory.hardware import HardwareProfile, LaneProfile
from penstock.memory.planning.expert_demand import NO_DEMAND, ExpertDemand
from penstock.memory.planning.experts.expert_window import EXPERT_OVERHEAD_S, ExpertWindow, expert_window
from penstock.memory.planning.plan import LayerPlacement, MemoryPlan
from penstock.memory.planning.product_times import LAYER_OVERHEAD_S, own_rates, product_s
from penstock.memory.planning.split_cost import SplitWork, split_work
from penstock.spec import ModelFootprint

#: Seconds of all that is not a product, for each token and element of a vector that passes a matrix, as
#: LAYER_OVERHEAD_S has them for each layer.
ELEMENT_S = 0.5e-9


@dataclass(frozen=True)
class StepPrediction:
    """A step of `num_tokens` tokens, of which `num_sampled` are sampled, and that encodes prompts of
    `num_encoded` tokens together."""

    num_tokens: int
    num_sampled: int
    #: Link, memory or arithmetic -> seconds for which it is busy. "experts" are the seconds of what can't
    #: overlap: a layer's experts are read after everything before its router.
    terms: dict[str, float]
    seconds: float
    #: What the step's products take, by measured rates of products.
    products_s: float = 0.0
    num_encoded: int = 0
    experts: ExpertDemand = NO_DEMAND
    #: The share of the layers' weights that the processor multiplies beside a card.
    processor_share: float = 0.0

    @property
    def floor_s(self) -> float:
        return max(self.terms.values())

    @property
    def binding(self) -> str:
        """The term that the step waits for. A link that is done before the products is not one."""
        computing = {"memory", "arithmetic", "experts", "processor"} & self.terms.keys()
        names = computing if computing and self.products_s > self.floor_s else self.terms.keys()
        return max(names, key=lambda name: self.terms[name])


class Predict(Protocol):
    """predict_step() of one engine."""

    def __call__(
        self,
        num_tokens: int,
        num_sampled: int,
        num_encoded: int = 0,
        demand: ExpertDemand | None = None,
        spilled_bytes: int = 0,
        attended_bytes: int = 0,
        /,
        *,
        is_alone: bool = False,
    ) -> StepPrediction: ...


#: The prediction where nothing was measured.
UNKNOWN = StepPrediction(0, 0, {"nothing": 0.0}, 0.0)


class MeasuredSteps:
    """Predictions from experience, where rates are unknown: a step takes max(floor_s, num_tokens * token_s),
    and each measured step shows one of the two. Sizes that are not known are tried: after a step that took no
    longer than the floor, the next step may be a quarter larger."""

    #: A step that takes more than this many times the floor is bound by its tokens.
    IS_BEYOND = 1.1
    GROWTH = 1.25

    def __init__(self) -> None:
        self.floor_s = math.inf
        self.token_s = math.inf

    def record(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` took `seconds`."""
        measured = seconds / num_tokens
        if seconds <= self.IS_BEYOND * self.floor_s:
            self.floor_s = min(self.floor_s, seconds)
            self.token_s = min(self.token_s, measured / self.GROWTH)
        elif num_tokens * self.token_s < 0.9 * self.floor_s:
            # So few tokens should have taken the floor's time: the floor has risen, or this step waited for
            # something else.
            self.floor_s *= self.IS_BEYOND
        else:
            self.token_s = (self.token_s + measured) / 2

    def predict_s(self, num_tokens: int) -> float:
        """Seconds of a step; 0 before any step was measured."""
        return 0.0 if self.floor_s == math.inf else max(self.floor_s, num_tokens * self.token_s)


def predict_step(
    plan: MemoryPlan,
    footprint: ModelFootprint,
    hardware: HardwareProfile,
    config: EngineConfig,
    num_tokens: int,
    num_sampled: int,
    num_encoded: int = 0,
    demand: ExpertDemand | None = None,
    spilled_bytes: int = 0,
    attended_bytes: int = 0,
    is_alone: bool = False,
) -> StepPrediction:
    """How long a step takes that also encodes prompts of `num_encoded` tokens together. A rate that is
    unknown (0, or no disk was measured) has no term. `demand` are the experts that the step asked for, if
    they are known. `spilled_bytes` of keys and values come from elsewhere or go there: over a GPU's link, or
    from the disk of the weights or, if they have one, a disk of their own. Writing is taken for as fast as
    reading. To `attended_bytes` more the processor attends beside a GPU (SpilledKeys.parts()). `is_alone`: a
    card computes all products of dense layers, whatever the plan says."""
    rows, lane = config.rows_per_token, hardware.lane
    elsewhere = _Elsewhere.of(spilled_bytes, attended_bytes, footprint, hardware)
    window = expert_window(plan, footprint.experts, hardware, rows, num_tokens, demand)
    demand = window.demand
    shares_products = plan.kept_share is not None and not is_alone
    if shares_products and (work := split_work(plan, footprint, hardware, config, num_tokens, window)):
        step = _shared_step(work, window, footprint, hardware, num_tokens, num_sampled, rows, elsewhere)
        return _with_encoder(step, plan, footprint, hardware, rows, num_encoded) if num_encoded else step
    elements = num_tokens * footprint.token_elements + num_encoded * footprint.encoder_elements
    elements -= min(elements, int(window.num_passes * footprint.experts.elements))
    moved = _Moved.of(plan, footprint, demand, num_encoded, elsewhere)
    operations = 2 * rows * (elements + num_sampled * footprint.head_elements)
    terms = _terms(moved, operations, window.reading_s, hardware)
    if not terms:
        return UNKNOWN
    floor_s = products_s = max(terms.values())
    if window.processor_s:
        floor_s = max(floor_s, moved.dense_bytes / lane.memory_gbps / 1e9 + window.waiting_s)
    if elsewhere.attended_bytes and lane.memory_gbps:  # a layer's attention is between its products
        floor_s = max(floor_s, moved.dense_bytes / lane.memory_gbps / 1e9 + elsewhere.attended_s)
    if lane.products:
        products_s = _dense_products_s(lane, footprint, rows, num_tokens, num_encoded, num_sampled)
        products_s += max(window.products_s, window.waiting_s) + elsewhere.attended_s
        copied_bytes = moved.streamed_bytes + 2 * elsewhere.moved_bytes
        products_s += copied_bytes / lane.memory_gbps / 1e9 if lane.memory_gbps else 0.0
    vectors = 0.0 if lane.has_own_memory else elements / footprint.hidden_size
    layers = plan.layers if num_encoded else plan.step_layers
    other_s = LAYER_OVERHEAD_S * sum(not layer.is_lower for layer in layers) + ELEMENT_S * vectors
    other_s += EXPERT_OVERHEAD_S * demand.num_asked
    seconds = max(floor_s, products_s) + other_s
    processor_share = moved.in_ram_bytes / (moved.dense_bytes + moved.expert_bytes + moved.in_ram_bytes)
    return StepPrediction(
        num_tokens, num_sampled, terms, seconds, products_s, num_encoded, demand, processor_share
    )


def _shared_step(
    work: SplitWork,
    window: ExpertWindow,
    footprint: ModelFootprint,
    hardware: HardwareProfile,
    num_tokens: int,
    num_sampled: int,
    rows: int,
    elsewhere: _Elsewhere,
) -> StepPrediction:
    """A step whose products a card and the processor share, `rows` rows for each token. The link is busy with
    weights for most of it, so that keys and values take time of their own."""
    step, share, lane = work.step, work.share, hardware.lane
    head = footprint.head_elements
    head_s = max(head / lane.memory_gbps, 2 * rows * num_sampled * head / lane.int8_gops) / 1e9
    streamed, size, demand = share * step.rest_bytes, footprint.experts.num_bytes, window.demand
    in_ram, on_card = size * demand.num_in_ram, size * (demand.num_asked - demand.num_in_ram)
    from_disk, disk_bps = size * demand.num_from_disk, 1e9 * _disk_gbps(hardware)
    moved, attended = elsewhere.moved_bytes, elsewhere.attended_bytes
    brought, left = step.link_share * streamed, step.rest_bytes - streamed
    link_bytes = brought + step.moved_bytes + moved
    terms = {
        # What comes over the link is written to memory before it is read.
        "memory": (step.kept_bytes + streamed + on_card + link_bytes + moved + head) / lane.memory_gbps / 1e9,
        "arithmetic": (step.kept_bytes + streamed) / step.card_bps + window.products_s + head_s,
        "host to device": link_bytes / step.link_bps,
        "processor": left / step.processor_bps + window.processor_s + attended / step.memory_bps,
        "host memory": (left + brought + step.moved_bytes + in_ram + from_disk + moved + attended)
        / step.memory_bps,
    }
    if from_disk and disk_bps:
        terms["disk"] = from_disk / disk_bps
    elsewhere_s = max(moved / step.link_bps, elsewhere.attended_s)
    seconds = max(step.seconds(share) + head_s + elsewhere_s, *terms.values())
    multiplied = step.kept_bytes + step.rest_bytes + size * demand.num_asked
    processor_share = (left + in_ram) / multiplied
    return StepPrediction(
        num_tokens,
        num_sampled,
        terms,
        seconds,
        terms["arithmetic"],
        experts=demand,
        processor_share=processor_share,
    )


def _with_encoder(
    step: StepPrediction,
    plan: MemoryPlan,
    footprint: ModelFootprint,
    hardware: HardwareProfile,
    rows: int,
    num_encoded: int,
) -> StepPrediction:
    """A step whose products are shared, behind a sweep of the encoder, which a card computes alone."""
    lane, num_bytes = hardware.lane, footprint.encoder_bytes
    streamed = _sum_bytes(layer for layer in plan.layers[: plan.num_encoder_layers] if not layer.is_resident)
    operations = 2 * rows * num_encoded * footprint.encoder_elements
    amounts = {
        "memory": (num_bytes + streamed, lane.memory_gbps),
        "arithmetic": (operations, lane.int8_gops),
        "host to device": (streamed, lane.link_gbps),
        "host memory": (streamed, hardware.memory_read_gbps),
    }
    terms = {name: amount / rate / 1e9 for name, (amount, rate) in amounts.items()}
    seconds = max(terms.values())
    if lane.products:
        products_s = product_s(lane.products, num_bytes, footprint.encoder_elements, rows * num_encoded)
        seconds = max(seconds, products_s)
    return replace(
        step,
        num_encoded=num_encoded,
        terms={name: own + terms.get(name, 0.0) for name, own in step.terms.items()},
        seconds=step.seconds + seconds + LAYER_OVERHEAD_S * plan.num_encoder_layers,
    )


class _Elsewhere(NamedTuple):
    """Keys and values that lie elsewhere."""

    #: Bytes that come or go, over a GPU's link or from and to the disk; and bytes to which the processor
    #: attends where they lie, in so many seconds.
    moved_bytes: int
    attended_bytes: int
    attended_s: float

    @classmethod
    def of(
        cls, spilled_bytes: int, attended_bytes: int, footprint: ModelFootprint, hardware: HardwareProfile
    ) -> _Elsewhere:
        """The processor shares its memory with the link, and each layer crosses once."""
        if not attended_bytes or not hardware.memory_read_gbps:
            return cls(spilled_bytes, 0, 0.0)
        num_layers = footprint.num_layers - footprint.num_encoder_layers
        attended_s = (spilled_bytes + attended_bytes) / hardware.memory_read_gbps / 1e9
        return cls(spilled_bytes, attended_bytes, attended_s + num_layers * hardware.lane.crossing_s)


@dataclass(frozen=True)
class _Moved:
    """The bytes that a step moves."""

    #: Weights that are multiplied: all but experts, experts, and experts that the processor computes beside
    #: a card.
    dense_bytes: int
    expert_bytes: float
    in_ram_bytes: float
    #: Weights that come to where they are computed, and from the disk; experts among them.
    streamed_bytes: float
    disk_bytes: float
    elsewhere: _Elsewhere

    @classmethod
    def of(
        cls,
        plan: MemoryPlan,
        footprint: ModelFootprint,
        demand: ExpertDemand,
        num_encoded: int,
        elsewhere: _Elsewhere,
    ) -> _Moved:
        swept, size = plan.layers if num_encoded else plan.step_layers, footprint.experts.num_bytes
        missing, from_disk = size * demand.num_missing, size * demand.num_from_disk
        dense = footprint.decoder_bytes + footprint.head_elements
        return cls(
            dense_bytes=dense + (footprint.encoder_bytes if num_encoded else 0),
            expert_bytes=size * (demand.num_asked - demand.num_in_ram),
            in_ram_bytes=size * demand.num_in_ram,
            streamed_bytes=missing + _sum_bytes(layer for layer in swept if not layer.is_resident),
            disk_bytes=from_disk + _sum_bytes(layer for layer in swept if layer.home == "disk"),
            elsewhere=elsewhere,
        )


def _terms(moved: _Moved, operations: int, reading_s: float, hardware: HardwareProfile) -> dict[str, float]:
    """Link, memory or arithmetic -> seconds. Missing experts arrive in `reading_s`."""
    lane, own_disk = hardware.lane, hardware.spill_disk
    spilled, attended, _ = moved.elsewhere
    over_link = spilled if lane.has_own_memory else 0
    from_disk = spilled - over_link
    shared_bytes = from_disk if own_disk is None else 0
    amounts = {
        # What is streamed is written to memory before it is read.
        "memory": (
            moved.dense_bytes + moved.expert_bytes + moved.streamed_bytes + 2 * spilled,
            lane.memory_gbps,
        ),
        "arithmetic": (operations, lane.int8_gops),
        "disk": (moved.disk_bytes + shared_bytes, _disk_gbps(hardware)),
        "spill disk": (from_disk - shared_bytes, own_disk.read_gbps if own_disk else 0.0),
        "host to device": (moved.streamed_bytes + over_link, lane.link_gbps),
        "processor": (moved.in_ram_bytes + attended, hardware.memory_read_gbps),
        # Copying to a GPU reads the host's memory, into which the disk writes.
        "host memory": (
            moved.streamed_bytes + moved.disk_bytes + moved.in_ram_bytes + over_link + attended,
            hardware.memory_read_gbps if lane.has_own_memory else 0.0,
        ),
    }
    terms = {name: amount / rate / 1e9 for name, (amount, rate) in amounts.items() if rate and amount}
    if moved.in_ram_bytes and hardware.memory_read_gbps:
        reading_s = max(reading_s, moved.in_ram_bytes / hardware.memory_read_gbps / 1e9)
    if reading_s and lane.memory_gbps:
        terms["experts"] = moved.dense_bytes / lane.memory_gbps / 1e9 + reading_s
    return terms


def _disk_gbps(hardware: HardwareProfile) -> float:
    return hardware.disk.read_gbps if hardware.disk else 0.0


def _sum_bytes(layers: Iterable[LayerPlacement]) -> int:
    return sum(layer.num_bytes for layer in layers)


def _dense_products_s(
    lane: LaneProfile,
    footprint: ModelFootprint,
    rows: int,
    num_tokens: int,
    num_encoded: int,
    num_sampled: int,
) -> float:
    """Seconds of a step's products but for experts, with `rows` rows for each token."""
    layers, head = (
        own_rates(lane.products, lane.formats, formats)
        for formats in (footprint.formats, footprint.head_formats)
    )
    return sum(
        product_s(lane.products, *each)
        for each in (
            (footprint.decoder_bytes, footprint.layer_elements, rows * num_tokens, layers),
            (footprint.encoder_bytes, footprint.encoder_elements, rows * num_encoded),
            (footprint.head_elements, footprint.head_elements, rows * num_sampled, head),
        )
    )
