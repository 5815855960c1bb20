"""StepPrediction: how long a step takes by a plan. Pure.

Each feature of a step brings its Work at the limits of the machine (step_work.py). At best, links, memories
and arithmetic overlap wholly: what takes longest is the floor. The prediction is what to expect. Links still
overlap with computing, but the lane, the processor or the card that computes the layers, does one thing after
the other: it multiplies as fast as products with this number of rows were measured, waits for experts, and
takes time for calls.

Experts that are missing can't be read before their layer's router has chosen them, so that their reading
overlaps with the products of the layer's experts alone. The seconds of this order are the term "experts":
all other weights / rate of the memory, and then the missing experts / rate of the disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.config import EngineConfig
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.expert_demand import EXPERT_OVERHEAD_S, NO_DEMAND, ExpertDemand, ExpertWindow
from penstock.memory.planning.plan import MemoryPlan
from penstock.memory.planning.product_times import LAYER_OVERHEAD_S, multiply_s
from penstock.memory.planning.step_work import EXPERTS, StepLoad, StepWork
from penstock.memory.planning.work import Timeline, Work, simulate
from penstock.spec import ModelFootprint

if TYPE_CHECKING:
    from penstock.memory.planning.split_cost import SplitWork

#: Seconds of all that is not a product, for each token and element of a vector that passes a matrix, as
#: LAYER_OVERHEAD_S has them for each layer.
ELEMENT_S = 0.5e-9
#: The resource of what the lane does.
LANE = "lane"


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


class Predictor(NamedTuple):
    """Predicts the steps of a model on a machine by any plan."""

    footprint: ModelFootprint
    hardware: HardwareProfile
    config: EngineConfig

    def step(self, plan: MemoryPlan, load: StepLoad) -> StepPrediction:
        return predict_step(plan, *self, load)

    def decode(self, plan: MemoryPlan, num_tokens: int) -> StepPrediction:
        return self.step(plan, StepLoad.decode(num_tokens))


#: predict_step() of one engine.
Predict = Callable[[StepLoad], StepPrediction]
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
    load: StepLoad,
) -> StepPrediction:
    """How long a step takes. A rate that is unknown (0, or no disk was measured) has no term."""
    rows, window = config.rows_per_token, ExpertWindow()
    if footprint.experts.count:
        from penstock.memory.planning.expert_window import expert_window

        window = expert_window(plan, footprint.experts, hardware, rows, load.num_tokens, load.demand)
    step = StepWork(plan, footprint, hardware, rows, load, window)
    if plan.kept_share is not None and not load.is_alone:
        from penstock.memory.planning.split_cost import split_work

        split = split_work(plan, footprint, hardware, config, load.num_tokens, window)
        if split is not None:
            return _shared(step, split)
    return _alone(step)


def _alone(step: StepWork) -> StepPrediction:
    """A step whose dense products the lane computes alone."""
    size, window, lane = step.size, step.window, step.hardware.lane
    limits = simulate(step.alone())
    terms, weights = _terms(step, limits), step.weights
    if not terms:
        return UNKNOWN
    has_rates = bool(lane.products)
    products = Work(LANE, _dense_products_s(step) if has_rates else weights.seconds)
    experts = Work(LANE, window.products_s if has_rates else 0.0)
    waiting = Work("waiting", window.waiting_s if weights.seconds else 0.0, after=(products,))
    written_s = step.written.seconds + step.copied_states.seconds if has_rates else 0.0
    # Without rates of products the lane is at its limits, where these overlap.
    between_s = step.attended_s + step.recurrence_s + written_s
    others = Work(LANE, between_s, after=(experts, waiting) if has_rates else (products,))
    expected = simulate((products, experts, waiting, others))
    seconds = max(limits.seconds, expected.seconds) + _calls_s(step)
    products_s = expected.ends.get(LANE, 0.0) if has_rates else max(terms.values())
    demand = window.demand
    in_ram = size.experts.num_bytes * demand.num_in_ram
    multiplied = step.dense_bytes + size.experts.num_bytes * demand.num_asked
    return _prediction(step, terms, seconds, products_s, in_ram / multiplied)


def _shared(step: StepWork, split: SplitWork) -> StepPrediction:
    """A step whose products a card and the processor share. The link is busy with weights for most of it, so
    that keys and values take time of their own; an encoder's layers come first, and the card computes them
    alone."""
    size, lane, demand = step.size, step.hardware.lane, step.window.demand
    encoder = step.encoder()
    limits = simulate([*encoder, *step.shared(split)])
    terms = _terms(step, limits)
    elsewhere_s = max(step.at("host to device", step.load.spilled_bytes).seconds, step.attended_s)
    chain = [Work(LANE, each) for each in (split.step.seconds(split.share), step.head_s, elsewhere_s)]
    if step.load.num_encoded:
        rows = step.rows_per_token * step.load.num_encoded
        products_s = multiply_s(lane, size.encoder_bytes, size.encoder_elements, rows)
        encoder_s = max(simulate(encoder).seconds, products_s)
        chain.insert(0, Work(LANE, encoder_s + LAYER_OVERHEAD_S * step.plan.num_encoder_layers))
    seconds = max(limits.seconds, simulate(chain).seconds)
    left = (1 - split.share) * split.step.rest_bytes + size.experts.num_bytes * demand.num_in_ram
    multiplied = split.step.kept_bytes + split.step.rest_bytes + size.experts.num_bytes * demand.num_asked
    return _prediction(step, terms, seconds, terms["arithmetic"], left / multiplied)


def _terms(step: StepWork, limits: Timeline) -> dict[str, float]:
    """Seconds for which each resource is busy; of experts, when they have come."""
    terms = {name: limits.busy[name] for name in step.rates if name in limits.busy}
    return terms | ({EXPERTS: limits.ends[EXPERTS]} if EXPERTS in limits.ends else {})


def _prediction(
    step: StepWork, terms: dict[str, float], seconds: float, products_s: float, processor_share: float
) -> StepPrediction:
    num_tokens, num_sampled, num_encoded = step.load[:3]
    experts = step.window.demand
    return StepPrediction(
        num_tokens, num_sampled, terms, seconds, products_s, num_encoded, experts, processor_share
    )


def _dense_products_s(step: StepWork) -> float:
    """Seconds of a step's products but for experts, by measured rates."""
    size, load, lane, rows = step.size, step.load, step.hardware.lane, step.rows_per_token
    head, encoded = size.head_elements, rows * load.num_encoded
    return (
        multiply_s(lane, size.decoder_bytes, size.layer_elements, rows * load.num_tokens, size.formats)
        + multiply_s(lane, size.encoder_bytes, size.encoder_elements, encoded)
        + multiply_s(lane, head, head, rows * load.num_sampled, size.head_formats)
    )


def _calls_s(step: StepWork) -> float:
    """Seconds of all that is no product."""
    layers = step.plan.layers if step.load.num_encoded else step.plan.step_layers
    seconds = LAYER_OVERHEAD_S * sum(not layer.is_lower for layer in layers)
    if not step.hardware.lane.has_own_memory:
        seconds += ELEMENT_S * step.num_elements / step.size.hidden_size
    return seconds + EXPERT_OVERHEAD_S * step.window.demand.num_asked
