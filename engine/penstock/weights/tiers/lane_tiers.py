"""LaneTiers: one tier of dense units and one of experts for each memory of a lane, as the plans say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from penstock.memory.lane import Lane
from penstock.memory.pages import round_up
from penstock.memory.planning.plan import TierPlan
from penstock.memory.pools import MemoryPool
from penstock.metrics import Traffic
from penstock.spec import UnitKey
from penstock.weights.tensors import Unit
from penstock.weights.tiers.arrivals import take_back
from penstock.weights.tiers.cyclic_tier import CyclicTier
from penstock.weights.tiers.readers import LinkReader
from penstock.weights.tiers.tier import UnitReader

if TYPE_CHECKING:
    from penstock.memory.planning.expert_lanes import ExpertRates
    from penstock.weights.tiers.demand_tier import DemandTier
    from penstock.weights.tiers.experts_in_ram import ExpertsInRam
    from penstock.weights.tiers.use_counts import UseCounts


class LaneTiers:
    """The processor has one memory: layers come from the disk to RAM, and are used there. A GPU has two:
    layers come from the disk to pinned RAM, and from there to the card. The first tier takes its units from
    the reader, each other tier from the tier before it."""

    def __init__(
        self,
        units: Mapping[UnitKey, Unit],
        reader: UnitReader,
        lane: Lane,
        plans: Sequence[TierPlan],
        uses: UseCounts[UnitKey],
        num_once: int = 0,
        pieces: Callable[[UnitKey], Sequence[tuple[int, int]] | None] = lambda key: None,
        expert_rates: ExpertRates | None = None,
    ) -> None:
        """Begins to read. `units` are in the order of a sweep; the first `num_once` dense units are
        swept once for each request, the others in each step. `uses` of experts go on from an earlier run.
        `pieces` says what a link copies of a unit; None: all of it. With `expert_rates`, the processor
        computes experts beside a card. Raises CapacityError before anything is read."""
        sizes = {key: round_up(unit.num_bytes) for key, unit in units.items()}
        dense = {key: size for key, size in sizes.items() if key.expert is None}
        experts = {key: size for key, size in sizes.items() if key.expert is not None}
        cycle = tuple(dense)
        self._lane = lane
        self._num_once = num_once
        self._pieces = pieces
        self._resident = [frozenset(cycle[index] for index in plan.resident) for plan in plans]
        self._pools = self._allocate(dense, experts, plans)
        #: The memory where layers are computed.
        self.pool = self._pools[-1]
        #: Tiers in the order from the disk to where layers are computed.
        self._dense: list[CyclicTier] = []
        self._experts: list[DemandTier] = []
        for index, (pool, plan) in enumerate(zip(self._pools, plans, strict=True)):
            self._add_dense(dense, reader, pool, plan)
            if experts:
                from penstock.weights.tiers.demand_tier import DemandTier

                below = LinkReader(self._experts[-1], lane.link) if index else reader
                pins = bool(index and expert_rates)
                own = DemandTier(
                    experts,
                    below,
                    pool,
                    plan.num_expert_slots,
                    uses.copy(),
                    pins,
                    is_alone=len(plans) == 1,
                )
                self._experts.append(own)
        #: The tiers where layers are computed. A model without experts has no tier of experts.
        self.nearest = self._dense[-1]
        self.farthest = self._dense[0]
        self.nearest_experts = self._experts[-1] if experts else None
        #: Experts that the processor computes where they lie, beside a card.
        self.experts_in_ram: ExpertsInRam | None = None
        if expert_rates is not None and len(self._experts) == 2:
            from penstock.weights.tiers.experts_in_ram import ExpertsInRam

            card, host = self._experts[1], self._experts[0]
            self.experts_in_ram = ExpertsInRam(card, host, expert_rates)

    def _allocate(
        self, dense: Mapping[UnitKey, int], experts: Mapping[UnitKey, int], plans: Sequence[TierPlan]
    ) -> list[MemoryPool]:
        """A pool for each memory. The memory that computes comes first: where it is too small, nothing has
        begun yet."""
        pools = []
        for memory, resident, plan in reversed(
            list(zip(self._lane.memories, self._resident, plans, strict=True))
        ):
            num_bytes = CyclicTier.pool_bytes(dense, resident, plan.num_slots)
            if experts:
                from penstock.weights.tiers.demand_tier import DemandTier

                num_bytes += DemandTier.pool_bytes(experts, plan.num_expert_slots)
            pools.append(MemoryPool(memory.name, num_bytes, memory.allocate, memory.prepare))
        return pools[::-1]

    def _add_dense(
        self, sizes: Mapping[UnitKey, int], reader: UnitReader, pool: MemoryPool, plan: TierPlan
    ) -> None:
        index = len(self._dense)
        below = LinkReader(self._dense[-1], self._lane.link, self._pieces) if index else reader
        # Units that a nearer memory keeps pass through the farther ones once.
        passing = frozenset[UnitKey]().union(*self._resident[index + 1 :])
        resident = self._resident[index]
        self._dense.append(CyclicTier(sizes, below, pool, resident, plan.num_slots, passing, self._num_once))

    @property
    def unpinned_bytes(self) -> int:
        """Bytes of the host's buffers for a GPU that the system refused to pin."""
        return self._lane.unpinned_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the tiers' buffers for a GPU that are locked in memory. What was refused may belong to
        others (keys and values): this may be too little then."""
        return max(0, sum(pool.used_bytes for pool in self._pools[:-1]) - self.unpinned_bytes)

    @property
    def streamed_bytes(self) -> int:
        """Bytes of units that came to where they are computed because a sweep needed them."""
        experts = self.nearest_experts.arrivals.traffic.num_bytes if self.nearest_experts is not None else 0
        return self.nearest.streamed_bytes + experts

    @property
    def expert_counts(self) -> tuple[int, int, int, int]:
        """Experts that layers asked for, those of them that were not where they are computed, those that had
        to come from the disk, and those that the processor computed beside a card."""
        if not self._experts:
            return 0, 0, 0, 0
        nearest, farthest = self._experts[-1], self._experts[0]
        return (
            nearest.num_asked,
            nearest.num_asked - nearest.num_hits,
            farthest.num_asked - farthest.num_hits,
            self.experts_in_ram.num_lent if self.experts_in_ram is not None else 0,
        )

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Everything that each link carried since the start. Reads of experts from the disk have a name of
        their own."""
        experts = {"disk, experts": self._experts[0].arrivals.traffic} if self._experts else {}
        return {"disk": self._dense[0].arrivals.traffic} | experts | self._lane.link.traffic

    def wait_until_loaded(self, report_progress: Callable[[int, int], None] | None = None) -> None:
        """Until every layer that stays in memory is there, without a sweep. `report_progress(loaded, total)`
        is called after each, and may raise to give up. Raises what reading raised."""
        num_loaded, total = 0, sum(len(tier.resident) for tier in self._dense)

        def report() -> None:
            nonlocal num_loaded
            num_loaded += 1
            if report_progress is not None:
                report_progress(num_loaded, total)

        for tier in reversed(self._dense):
            tier.wait_until_loaded(report)

    def take_back(self) -> list[Tensor]:
        """Take back the units of a sweep that was given up and not closed. Returns their buffers."""
        experts = self.nearest_experts.take_back() if self.nearest_experts is not None else []
        return take_back(self.nearest.arrivals) + experts

    def close(self) -> None:
        """Read nothing more, and wait for what is being read into our buffers."""
        # The first tier that closes also closes the reader, which the others share.
        tiers: list[CyclicTier | DemandTier] = [*self._experts, *self._dense]
        for tier in tiers:
            tier.arrivals.stop()
        if self.nearest_experts is not None:
            self.nearest_experts.close()
        self.nearest.close()
