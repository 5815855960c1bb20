"""Sharing: what a model is loaded with whose products a card and the processor share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from penstock.config import EngineConfig
from penstock.kernels import Kernels, host_kernels
from penstock.memory.hardware import HardwareProfile
from penstock.memory.lane import Lane
from penstock.memory.planning.plan import MemoryPlan
from penstock.spec import ModelFootprint
from penstock.weights.tensors import ModelTensors
from penstock.weights.tiers.tier import UnitReader

if TYPE_CHECKING:
    from penstock.memory.planning.expert_lanes import ExpertRates
    from penstock.weights.split.shared_rows import SharedRows


class Sharing(NamedTuple):
    """The parts of an engine that may be others where products are shared."""

    tensors: ModelTensors
    reader: UnitReader
    kernels: Kernels
    rows: SharedRows | None = None
    #: What experts cost that the processor computes where they lie.
    expert_rates: ExpertRates | None = None

    @classmethod
    def of(
        cls,
        plan: MemoryPlan,
        tensors: ModelTensors,
        reader: UnitReader,
        kernels: Kernels,
        lane: Lane,
        config: EngineConfig,
        share_of: Callable[[int], float],
        rates: ExpertRates | None = None,
    ) -> Sharing:
        """As the plan says. `share_of` is streamed_share(), `rates` are expert_rates() if experts
        are shared. Raises CapacityError."""
        if plan.kept_share is None and not plan.shares_experts:
            return cls(tensors, reader, kernels)
        from penstock.kernels.shared.shared_kernels import SharedKernels
        from penstock.weights.split.row_split import split_rows
        from penstock.weights.split.shared_rows import SharedRows
        from penstock.weights.split.split_reader import SplitReader

        beside = host_kernels(config)

        shared = SharedKernels(kernels, beside, lane.handover())
        if plan.kept_share is None:
            return cls(tensors, reader, shared, expert_rates=rates)
        halves = split_rows(tensors, plan.kept_share, plan.keeps_upper)
        whole, parts = ({unit.key: unit for unit in each.units} for each in (tensors, halves))
        rows = SharedRows(parts, share_of, plan.keeps_upper)
        return cls(halves, SplitReader(reader, whole, parts), shared, rows, rates)


def streamed_share(
    plan: MemoryPlan, size: ModelFootprint, hardware: HardwareProfile, config: EngineConfig
) -> Callable[[int], float]:
    """The share of what lies in RAM that the link brings, for a number of tokens."""

    @cache
    def share_of(num_tokens: int) -> float:
        from penstock.memory.planning.split_cost import split_work

        work = split_work(plan, size, hardware, config, num_tokens)
        return 1.0 if work is None else work.share

    return share_of
