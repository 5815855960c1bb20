"""StepPrediction: how long a step takes by a plan. Pure.

A step reads every weight once, streams what is not resident, and multiplies. An encoder's weights take part
only in a step that encodes a prompt. At best these three overlap
wholly: the floor that physics sets is max(bytes / rate of each link, bytes of weights / rate of the memory,
operations / rate). The prediction is what to expect: links still overlap with computing, but a product takes
as long as products with this number of rows were measured to take, and the rest of a layer takes time of its
own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from penstock.config import EngineConfig
from penstock.memory.hardware import HardwareProfile, ProductRates
from penstock.memory.plan import LayerPlacement, MemoryPlan
from penstock.spec import ModelFootprint

#: Seconds of all that is not a product (norms, attention over a short context, activations, the calls
#: themselves), measured on two cores: first per layer, then per token and element of a vector that passes a
#: matrix.
LAYER_OVERHEAD_S = 150e-6
ELEMENT_S = 0.5e-9


@dataclass(frozen=True)
class StepPrediction:
    """A step of `num_tokens` tokens, of which `num_sampled` are sampled, and that encodes prompts of
    `num_encoded` tokens together."""

    num_tokens: int
    num_sampled: int
    #: Link, memory or arithmetic -> seconds for which it is busy.
    terms: dict[str, float]
    seconds: float
    #: What the step's products take, by measured rates of products.
    products_s: float = 0.0
    num_encoded: int = 0

    @property
    def floor_s(self) -> float:
        return max(self.terms.values())

    @property
    def binding(self) -> str:
        """The term that the step waits for. A link that is done before the products is not one."""
        computing = {"memory", "arithmetic"} & self.terms.keys()
        names = computing if computing and self.products_s > self.floor_s else self.terms.keys()
        return max(names, key=lambda name: self.terms[name])


class Predict(Protocol):
    """predict_step() of one engine."""

    def __call__(self, num_tokens: int, num_sampled: int, num_encoded: int = 0, /) -> StepPrediction: ...


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
) -> StepPrediction:
    """How long a step takes that also encodes prompts of `num_encoded` tokens together. A rate that is
    unknown (0, or no disk was measured) has no term."""
    rows = config.rows_per_token
    elements = num_tokens * footprint.token_elements + num_encoded * footprint.encoder_elements
    operations = 2 * rows * (elements + num_sampled * footprint.head_elements)
    lane = hardware.lane
    asked_bytes, missing_bytes = _expert_bytes(plan, footprint, num_tokens)
    layer_bytes = footprint.decoder_bytes + asked_bytes
    encoder_bytes = footprint.encoder_bytes if num_encoded else 0
    swept = plan.layers if num_encoded else plan.step_layers
    streamed_bytes = missing_bytes + _sum_bytes(layer for layer in swept if not layer.is_resident)
    disk_bytes = missing_bytes + _sum_bytes(layer for layer in swept if layer.home == "disk")
    amounts = {
        # Streamed weights are written to memory before they are read.
        "memory": (layer_bytes + encoder_bytes + footprint.head_elements + streamed_bytes, lane.memory_gbps),
        "arithmetic": (operations, lane.int8_gops),
        "disk": (disk_bytes, hardware.disk.read_gbps if hardware.disk else 0.0),
        "host to device": (streamed_bytes, lane.link_gbps),
        # Copying to a GPU reads the host's memory, into which the disk writes.
        "host memory": (
            streamed_bytes + disk_bytes,
            hardware.memory_read_gbps if lane.has_own_memory else 0.0,
        ),
    }
    terms = {name: amount / rate / 1e9 for name, (amount, rate) in amounts.items() if rate and amount}
    if not terms:
        return UNKNOWN
    floor_s = products_s = max(terms.values())
    if lane.products:
        asked_elements = asked_bytes * footprint.experts.elements // max(1, footprint.experts.num_bytes)
        work = (
            (layer_bytes, footprint.layer_elements + asked_elements, rows * num_tokens),
            (encoder_bytes, footprint.encoder_elements, rows * num_encoded),
            (footprint.head_elements, footprint.head_elements, rows * num_sampled),
        )
        products_s = sum(_product_s(lane.products, *each) for each in work)
        products_s += streamed_bytes / lane.memory_gbps / 1e9 if lane.memory_gbps else 0.0
    vectors = 0.0 if lane.has_own_memory else elements / footprint.hidden_size
    other_s = LAYER_OVERHEAD_S * sum(not layer.is_lower for layer in swept) + ELEMENT_S * vectors
    seconds = max(floor_s, products_s) + other_s
    return StepPrediction(num_tokens, num_sampled, terms, seconds, products_s, num_encoded)


def _sum_bytes(layers: Iterable[LayerPlacement]) -> int:
    return sum(layer.num_bytes for layer in layers)


def _expert_bytes(plan: MemoryPlan, footprint: ModelFootprint, num_tokens: int) -> tuple[int, int]:
    """Bytes of the experts that a step asks for, and of those among them that are not in memory. Both are
    upper estimates: they assume that tokens choose experts evenly and independently of each other."""
    experts = footprint.experts
    if not experts.count:
        return 0, 0
    share_asked = 1 - (1 - experts.count_per_token / experts.count) ** num_tokens
    share_missing = 1 - min(1.0, plan.num_expert_slots / experts.count)
    asked = share_asked * experts.count * experts.num_bytes
    return int(asked), int(asked * share_missing)


def _product_s(products: ProductRates, num_bytes: int, num_elements: int, rows: int) -> float:
    """Seconds of products by matrices with so many bytes and elements. Rates are those of INT8, a byte for
    each element. With the fewest rows a product waits for its bytes; what more rows add is arithmetic, which
    goes by elements."""
    if rows == 0:
        return 0.0
    reading = 1 / products[0][1] / 1e9
    return num_bytes * reading + num_elements * (_seconds_per_byte(products, rows) - reading)


def _seconds_per_byte(products: ProductRates, rows: int) -> float:
    """Seconds per byte of weights that meet so many rows. Between two measured numbers of rows the seconds
    lie on the line through both; beyond the largest they grow in proportion."""
    before_rows, before_gbps = products[0]
    for known_rows, gbps in products:
        if rows <= known_rows:
            share = (rows - before_rows) / max(1, known_rows - before_rows)
            return (1 / before_gbps + max(0.0, share) * (1 / gbps - 1 / before_gbps)) / 1e9
        before_rows, before_gbps = known_rows, gbps
    return rows / before_rows / before_gbps / 1e9
