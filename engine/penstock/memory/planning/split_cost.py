"""A model's step on a machine as a SplitStep: what a card and the processor share, and how. Pure."""

from __future__ import annotations

from typing import NamedTuple

from penstock.config import EngineConfig
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.expert_demand import ExpertWindow
from penstock.memory.planning.expert_window import expert_window
from penstock.memory.planning.plan import MemoryPlan
from penstock.memory.planning.product_split import (
    SplitStep,
    whole_share,
)
from penstock.memory.planning.product_times import LAYER_OVERHEAD_S, multiply_s
from penstock.spec import ModelFootprint

#: What is queued for a product of three parts beside its crossing, which is measured with what it queues:
#: inputs become integers, and two products.
LAUNCHES = 3


class SplitWork(NamedTuple):
    """A step, and the share of what lies in RAM that the card gets."""

    step: SplitStep
    share: float

    @property
    def processor_share(self) -> float:
        """Of all weights of layers, those that the processor multiplies."""
        return (1 - self.share) * self.step.rest_bytes / (self.step.rest_bytes + self.step.kept_bytes)


def split_work(
    plan: MemoryPlan,
    footprint: ModelFootprint,
    hardware: HardwareProfile,
    config: EngineConfig,
    num_tokens: int,
    window: ExpertWindow | None = None,
) -> SplitWork | None:
    """A step of `num_tokens` tokens by a plan that keeps a share of each matrix on the card; an encoder's
    layers are not part of it. None if a rate is unknown. `window` are the step's experts, if they are
    known."""
    lane, rows = hardware.lane, config.rows_per_token * num_tokens
    known = (lane.memory_gbps, lane.link_gbps, lane.int8_gops, hardware.memory_read_gbps, hardware.int8_gops)
    if not all(known):
        return None
    kept, rest = (
        sum(layer.num_bytes for layer in plan.step_layers if layer.home == home)
        for home in ("device", "host")
    )
    link_share = _link_share(footprint) if plan.keeps_upper else 1.0
    multiplied = kept + link_share * rest  # upper planes of the rest that the card keeps count once
    elements, formats = footprint.layer_elements, footprint.formats
    card_s = multiply_s(lane, multiplied, elements, rows, formats) / multiplied
    rest_elements = rest * elements / multiplied
    processor_s = multiply_s(hardware.processor, rest, rest_elements, rows, formats) / rest if rest else 0.0
    if window is None:
        window = expert_window(plan, footprint.experts, hardware, config.rows_per_token, num_tokens)
    num_products = sum(map(len, footprint.matrices))
    step = SplitStep(
        max(0.0, multiplied - rest),
        rest,
        lane.link_gbps * 1e9,
        hardware.memory_read_gbps * 1e9,
        1 / card_s,
        1 / processor_s if processor_s else float("inf"),
        LAYER_OVERHEAD_S * (footprint.num_layers - footprint.num_encoder_layers) + window.seconds,
        lane.crossing_s * num_products,
        lane.launch_s * LAUNCHES * num_products,
        footprint.experts.num_bytes * window.demand.num_missing,
        link_share,
    )
    return SplitWork(step, _whole(step))


def _link_share(footprint: ModelFootprint) -> float:
    """Of the bytes of matrices, those that the link brings to a card that has all upper planes."""
    matrices = [each for layer in footprint.matrices for each in layer]
    lower = sum(each.out_features * (each.lower_bytes or each.row_bytes) for each in matrices)
    return lower / sum(each.out_features * each.row_bytes for each in matrices)


def _whole(step: SplitStep) -> float:
    """The best whole share; streaming alone where a whole share is no better."""
    share = whole_share(step.best_share())
    return 1.0 if step.seconds(1.0) <= step.seconds(share) else share
