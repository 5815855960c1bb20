"""When a card and the processor share products, and what the card keeps. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.config import EngineConfig
from penstock.memory.hardware import HardwareProfile
from penstock.memory.pages import round_up
from penstock.memory.planning.cost import predict_step
from penstock.memory.planning.plan import MemoryPlan
from penstock.memory.planning.product_split import SHARE_STEPS, part_rows
from penstock.memory.planning.split_cost import split_work
from penstock.spec import ModelFootprint

#: Sharing has to save this part of a step of one token: predictions are not more exact.
LEAST_GAIN = 0.05


def may_share_products(
    plan: MemoryPlan, footprint: ModelFootprint, hardware: HardwareProfile, config: EngineConfig
) -> bool:
    """Whether there is a card, layers that don't stay in its memory, and a model whose products can be
    shared."""
    is_streamed = plan.has_gpu and plan.streamed_bytes > 0
    has_rates = bool(hardware.memory_read_gbps and hardware.int8_gops and hardware.lane.link_gbps)
    return is_streamed and has_rates and bool(footprint.matrices) and config.share_products == "auto"


def kept_shares(plan: MemoryPlan, footprint: ModelFootprint, config: EngineConfig) -> Iterator[float]:
    """Shares of each matrix that a card may keep, the largest first. `plan` is the plan without sharing,
    whose resident layers take about as many bytes."""
    if config.num_resident_layers is not None:
        yield min(1.0, config.num_resident_layers / footprint.num_layers)
        return
    staging = plan.num_staging_slots * plan.staging_slot_bytes
    total = sum(footprint.layer_bytes)
    most = int(SHARE_STEPS * (plan.layer_bytes("device") + staging) / total)
    yield from (step / SHARE_STEPS for step in range(min(most, SHARE_STEPS - 1), -1, -1))


def split_footprint(footprint: ModelFootprint, share: float) -> ModelFootprint:
    """The footprint of the model whose layers are two units each, as split_rows() (weights/split) makes
    it."""
    units = list[int]()
    for size, matrices in zip(footprint.layer_bytes, footprint.matrices, strict=True):
        rest = sum((rows - part_rows(rows, share)) * row_bytes for rows, row_bytes in matrices)
        units += (size - rest, rest)
    places = frozenset(range(1, len(units), 2))
    return replace(footprint, layer_bytes=tuple(units), lower_planes=places, is_split=True)


def shared_if_faster(
    shared: MemoryPlan,
    alone: MemoryPlan,
    footprint: ModelFootprint,
    hardware: HardwareProfile,
    config: EngineConfig,
) -> MemoryPlan | None:
    """The plan with shared products and what it brings, for people; None if it brings too little."""
    before, after = (predict_step(plan, footprint, hardware, config, 1, 1) for plan in (alone, shared))
    if after.seconds > (1 - LEAST_GAIN) * before.seconds or not after.processor_share:
        return None
    texts = []
    for num_tokens in (1, 32):
        work = split_work(shared, footprint, hardware, config, num_tokens)
        if work is not None:
            texts.append(
                f"with {num_tokens} token{'s' if num_tokens > 1 else ''} in a step the processor computes "
                f"{work.processor_share:.0%} of the layers"
            )
    kept = round_up(shared.layer_bytes("device")) / sum(footprint.layer_bytes)
    note = (
        f"the card and the processor share each product: the card keeps {kept:.0%} of each layer, and "
        f"{'; '.join(texts)}. A step of one token should take {after.seconds:.2g} s instead of "
        f"{before.seconds:.2g} s (--share-products off decides otherwise)"
    )
    return replace(shared, notes=(*shared.notes, note))
