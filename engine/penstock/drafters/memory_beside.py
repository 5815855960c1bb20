"""Where a second model guesses, and the memory that it leaves to the model itself.

Beside a model on a card, the second model computes on the same card, in a lane of its own. It is planned
first, and the model's plan gets what is left of the budget. Where it would not stay on the card, the
processor computes it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from penstock.config import EngineConfig, card_number
from penstock.errors import CapacityError, MemoryName
from penstock.loader import PlannedModel, plan_model
from penstock.memory.hardware import HardwareProfile
from penstock.memory.host_lane import HostLane
from penstock.memory.lane import Lane, gpu_trouble
from penstock.memory.planning.plan import CUDA_CONTEXT_BYTES, MemoryPlan, gib
from penstock.model.registry import OpenModel

logger = logging.getLogger(__name__)


def is_on_card(config: EngineConfig) -> bool:
    """Whether a card will compute the model."""
    return config.device != "cpu" and gpu_trouble(card_number(config.device) or 0) is None


def plan_beside(
    opened: OpenModel,
    own: EngineConfig,
    config: EngineConfig,
    hardware: HardwareProfile | None,
    settle: Callable[[PlannedModel], PlannedModel],
    shares_ends: bool = False,
) -> PlannedModel:
    """The plan of a second model, whose config is `own`, beside a model of this config: in the first lane
    where `settle` raises no CapacityError. settle() may plan once more, in the lane of the plan that it gets.
    `shares_ends`: some matrices are the model's, so that no other lane will do. Raises what the last lane
    raises."""
    trouble: CapacityError | None = None
    for lane in _lanes(config, shares_ends):
        with contextlib.ExitStack() as undo:
            undo.callback(lane.close)
            try:
                budget = config.device_memory_bytes if lane.choice != "cpu" else None
                beside = replace(own, device=lane.choice, device_memory_bytes=budget)
                planned = settle(plan_model(opened, beside, lane, hardware, shares_ends=shares_ends))
            except CapacityError as error:
                # Without its traceback, whose frames would keep what was planned, and memory of the card.
                trouble = error.with_traceback(None)
                logger.info("the drafter is not computed on %s: %s", lane.choice, error)
                continue
            undo.pop_all()
            return planned._replace(plan=_without_slack(planned.plan))
    assert trouble is not None, "there is always a lane"
    raise trouble


def _lanes(config: EngineConfig, shares_ends: bool) -> Iterator[Lane]:
    """The places where a second model may compute, the best first."""
    on_card = is_on_card(config)
    if on_card and (shares_ends or config.draft_device == "auto"):
        from penstock.memory.cuda_lane import CudaLane

        yield CudaLane(card_number(config.device) or 0)
    if not on_card or not shares_ends:
        yield HostLane()


def _without_slack(plan: MemoryPlan) -> MemoryPlan:
    """The plan with a card's budget that is as large as what the plan uses: the rest is the model's."""
    return replace(plan, device_budget_bytes=plan.device_used_bytes)


def card_bytes(plan: MemoryPlan) -> int:
    """What a second model takes of a card: all models of a process share the context."""
    return max(0, plan.device_used_bytes - CUDA_CONTEXT_BYTES)


def config_beside(config: EngineConfig, draft: MemoryPlan) -> EngineConfig:
    """The config with the memory that a draft model leaves. Raises CapacityError if it leaves none."""
    host, device = config.host_memory_bytes, config.device_memory_bytes
    return replace(
        config,
        host_memory_bytes=_left(host, draft.host_used_bytes, "host"),
        device_memory_bytes=_left(device, card_bytes(draft), "device"),
    )


def _left(budget: int | None, used: int, memory: MemoryName) -> int | None:
    if budget is None:
        return None
    if budget <= used:
        raise CapacityError(
            f"the draft model takes {gib(used)} of {gib(budget)}: nothing is left for the model itself. Take "
            f"a smaller one, or raise --{memory}-memory",
            memory,
        )
    return budget - used


def machine_beside(config: EngineConfig, hardware: HardwareProfile, draft: MemoryPlan) -> HardwareProfile:
    """The machine, which was described before the draft model was there, with the memory that it leaves."""
    if config.host_memory_bytes is None:
        free = max(0, hardware.free_ram_bytes - draft.host_used_bytes)
        hardware = replace(hardware, free_ram_bytes=free)
    if config.device_memory_bytes is None and hardware.device is not None:
        free = max(0, hardware.device.free_bytes - card_bytes(draft))
        hardware = replace(hardware, device=replace(hardware.device, free_bytes=free))
    return hardware
