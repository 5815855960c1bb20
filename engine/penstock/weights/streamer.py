"""LayerStreamer: each layer's weights where they are computed, in order, wherever they wait."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from penstock.memory.lane import Lane
from penstock.memory.pages import round_up
from penstock.memory.plan import TierPlan
from penstock.memory.pools import MemoryPool
from penstock.metrics import Traffic
from penstock.spec import DECODER, UnitKey
from penstock.weights.demand_tier import DemandTier
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.readers import LinkReader
from penstock.weights.tensors import ModelTensors, Unit
from penstock.weights.tier import CyclicTier, UnitReader


class LayerStreamer:
    """Yields every layer of a stack, once per sweep. One sweep at a time.

    There is a tier for each memory of the lane: on the processor one (disk to RAM, where layers are used), on
    a GPU two of the same kind (disk to pinned RAM, and from there to the card), each with its resident layers
    and its staging slots. Experts have tiers of their own in the same memories."""

    def __init__(
        self,
        tensors: ModelTensors,
        reader: UnitReader,
        lane: Lane,
        plans: Sequence[TierPlan],
        num_experts_per_sweep: int = 0,
    ) -> None:
        """Begins to read. `plans` say what stays in each of the lane's memories. A sweep of one token asks
        for `num_experts_per_sweep` experts. Raises CapacityError."""
        self._lane = lane
        self._units = {unit.key: unit for unit in tensors.units}
        dense = {key: round_up(unit.num_bytes) for key, unit in self._units.items() if key.expert is None}
        experts = {
            key: round_up(unit.num_bytes) for key, unit in self._units.items() if key.expert is not None
        }
        self._cycle = tuple(dense)
        self._stacks = {stack.name: len(stack.layers) for stack in tensors.stacks}
        resident = [frozenset(self._cycle[index] for index in plan.resident) for plan in plans]
        # The memory that computes first: where it is too little, nothing has begun yet.
        pools = [
            MemoryPool(
                memory.name,
                CyclicTier.pool_bytes(dense, kept, plan.num_slots)
                + DemandTier.pool_bytes(experts, plan.num_expert_slots),
                memory.allocate,
                memory.prepare,
            )
            for memory, kept, plan in reversed(list(zip(lane.memories, resident, plans, strict=True)))
        ][::-1]
        self.pool = pools[-1]
        self._farther_pools = pools[:-1]
        self._tiers: list[CyclicTier] = []
        self._expert_tiers: list[DemandTier] = []
        dense_reader = expert_reader = reader
        for index, (pool, plan) in enumerate(zip(pools, plans, strict=True)):
            if index:
                dense_reader = LinkReader(self._tiers[-1], lane.link)
            # Units that a nearer memory keeps pass through the farther ones once.
            passing = frozenset().union(*resident[index + 1 :])
            self._tiers.append(
                CyclicTier(dense, dense_reader, pool, resident[index], plan.num_slots, passing)
            )
            if experts:
                expert_reader = LinkReader(self._expert_tiers[-1], lane.link) if index else reader
                self._expert_tiers.append(
                    DemandTier(experts, expert_reader, pool, plan.num_expert_slots, num_experts_per_sweep)
                )
        self._tier = self._tiers[-1]
        self._num_sweeps = 0
        self._views: dict[tuple[UnitKey, int], LayerWeights] = {}
        #: The layer that is in use or waited for, counted over all stacks; None between sweeps. Any thread
        #: may look.
        self.current_layer: int | None = None

    @property
    def torch_device(self) -> torch.device:
        """Where layers arrive."""
        return self._lane.torch_device

    @property
    def num_layers(self) -> int:
        """Of all stacks."""
        return len(self._cycle)

    def keys_of(self, layers: Collection[int]) -> list[UnitKey]:
        """Of layers that are counted over all stacks."""
        return [key for index, key in enumerate(self._cycle) if index in layers]

    @property
    def layer_bytes(self) -> int:
        """Of all dense units."""
        return sum(self._units[key].num_bytes for key in self._cycle)

    @property
    def unpinned_bytes(self) -> int:
        """Of the host's buffers that feed a GPU, what the system refused to pin."""
        return self._lane.unpinned_bytes

    @property
    def pinned_bytes(self) -> int:
        """Of those, what is locked in memory."""
        return sum(pool.used_bytes for pool in self._farther_pools) - self.unpinned_bytes

    @property
    def num_resident(self) -> int:
        return len(self._tier.resident)

    @property
    def num_slots(self) -> int:
        return self._tier.num_slots

    @property
    def streamed_bytes(self) -> int:
        """Of units that came to where they are computed because a sweep needed them."""
        return self._tier.streamed_bytes + sum(tier.streamed_bytes for tier in self._expert_tiers[-1:])

    @property
    def stall_s(self) -> float:
        """Seconds in which computing waited for weights."""
        return self._lane.link.stall_s

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Of each link, everything since the start; experts' reads from the disk under a name of their
        own."""
        experts = {"disk, experts": self._expert_tiers[0].traffic} if self._expert_tiers else {}
        return {"disk": self._tiers[0].traffic} | experts | self._lane.link.traffic

    def wait_until_loaded(self, report_progress: Callable[[int, int], None] | None = None) -> None:
        """Until every layer that stays in memory is there, without a sweep. `report_progress(loaded, total)`
        is called after each, and may raise to give up. Raises what reading raised."""
        num_loaded, total = 0, sum(len(tier.resident) for tier in self._tiers)

        def report() -> None:
            nonlocal num_loaded
            num_loaded += 1
            if report_progress is not None:
                report_progress(num_loaded, total)

        for tier in reversed(self._tiers):
            tier.wait_until_loaded(report)

    def layers(self, stack: str = DECODER) -> Generator[LayerWeights, None, None]:
        """One sweep of a stack. A layer's weights are valid, for what is launched on the lane, until the next
        one is asked for.

        Raises what reading raised (CorruptFile); the layer is read anew in the next sweep.
        """
        self._num_sweeps += 1
        this_sweep = self._num_sweeps
        self._tier.take_back()
        try:
            yield from self._sweep(stack, this_sweep)
        finally:
            if this_sweep == self._num_sweeps:
                self.current_layer = None

    def _sweep(self, stack: str, this_sweep: int) -> Generator[LayerWeights, None, None]:
        first = self._cycle.index(UnitKey(stack, 0))
        link, tier = self._lane.link, self._tier
        for index in range(first, first + self._stacks[stack]):
            self.current_layer = index
            key, stalled_before = self._cycle[index], tier.stall_s
            buffer = tier.acquire(key).buffer
            link.acquire(buffer, tier.stall_s - stalled_before)
            try:
                yield self._views_of(key, buffer)
            finally:
                # A sweep that was given up and is closed late takes nothing from the one that goes on.
                if this_sweep == self._num_sweeps:
                    link.release(buffer)
                    tier.release(key)

    def _experts(self, layer: UnitKey, numbers: Sequence[int]) -> Iterator[tuple[int, LayerWeights]]:
        """LayerWeights.experts() of a layer."""
        link, tier = self._lane.link, self._expert_tiers[-1]
        stalled_before = tier.stall_s
        for key, arrival in tier.gather([layer._replace(expert=number) for number in numbers]):
            assert key.expert is not None
            link.acquire(arrival.buffer, tier.stall_s - stalled_before)
            yield key.expert, self._views_of(key, arrival.buffer)
            link.release(arrival.buffer)
            stalled_before = tier.stall_s

    def _views_of(self, key: UnitKey, buffer: Tensor) -> LayerWeights:
        """Made once for each place where a unit can lie: a dozen views take a tenth of a millisecond."""
        place = key, buffer.data_ptr()
        if place not in self._views:
            unit: Unit = self._units[key]
            self._views[place] = LayerWeights.views(unit.layout, buffer, partial(self._experts, key))
        return self._views[place]

    def synchronize(self) -> None:
        """Until the lane has done everything, so that figures are complete."""
        self._lane.link.synchronize()

    def close(self) -> None:
        """Ask for nothing more, wait for what is being read into our buffers, and give their memory back."""
        # The first tier that closes also closes the reader, which the others share.
        tiers: list[CyclicTier | DemandTier] = [*self._expert_tiers, *self._tiers]
        for tier in tiers:
            tier.stop()
        for expert_tier in self._expert_tiers[-1:]:
            expert_tier.close()
        self._tier.close()
        self._lane.close()
        self._views.clear()
