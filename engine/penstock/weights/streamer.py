"""LayerStreamer: each layer's weights where they are computed, in order, wherever they wait."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Collection, Generator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.memory.lane import Lane
from penstock.memory.planning.plan import TierPlan
from penstock.spec import DECODER, UnitKey
from penstock.weights.layer_views import LayerViews
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import ModelTensors
from penstock.weights.tiers.lane_tiers import LaneTiers
from penstock.weights.tiers.tier import UnitReader
from penstock.weights.tiers.use_counts import UseCounts

if TYPE_CHECKING:
    from penstock.memory.planning.expert_lanes import ExpertRates
    from penstock.weights.split.shared_rows import SharedRows


class LayerStreamer:
    """Yields every layer of a stack, once per sweep. One sweep at a time."""

    def __init__(
        self,
        tensors: ModelTensors,
        reader: UnitReader,
        lane: Lane,
        plans: Sequence[TierPlan],
        uses: UseCounts[UnitKey] | None = None,
        shared: SharedRows | None = None,
        expert_rates: ExpertRates | None = None,
    ) -> None:
        """Begins to read. `plans` say what stays in each of the lane's memories. `uses` of experts go on from
        an earlier run. `shared`: the processor computes rows that lie in RAM. `expert_rates`: it computes
        experts that lie there. Raises CapacityError."""
        self.lane = lane
        self._shared = shared
        units = {unit.key: unit for unit in tensors.units}
        self._cycle = tuple(key for key in units if key.expert is None)
        #: The dense units of each layer, in the order of a sweep over all stacks.
        self._layers = [
            tuple(keys) for _, keys in itertools.groupby(self._cycle, lambda key: (key.stack, key.layer))
        ]
        self._stacks = {stack.name: len(stack.layers) for stack in tensors.stacks}
        #: Where the units are, and what was read of them.
        self.tiers = LaneTiers(
            units,
            reader,
            lane,
            plans,
            uses or UseCounts(0),
            tensors.num_encoder_units,
            shared.pieces if shared is not None else lambda key: None,
            expert_rates,
        )
        experts = self.tiers.nearest_experts
        in_ram = self.tiers.experts_in_ram
        self._handover = lane.handover() if shared is not None or in_ram is not None else None
        self._lender: ExpertLender | None = None
        if experts is not None:
            from penstock.weights.expert_lender import ExpertLender

            self._lender = ExpertLender(units, experts, lane.link, in_ram, self._handover)
        self._num_sweeps = 0
        self._views = LayerViews(units, self._layers, self.tiers, self._lender, shared)
        #: Layers that stay in memory and are there, by their places: nothing takes them away again.
        self._staying: dict[int, LayerWeights] = {}
        #: The layer that is in use or waited for, counted over all stacks; None between sweeps. Any thread
        #: may look.
        self.current_layer: int | None = None
        #: When it changed last, by time.monotonic(). Any thread may read this, too.
        self.moved_s = -math.inf

    @property
    def torch_device(self) -> torch.device:
        """Where layers arrive."""
        return self.lane.torch_device

    @property
    def num_layers(self) -> int:
        """Layers of all stacks."""
        return len(self._layers)

    @property
    def num_resident_layers(self) -> int:
        """Layers of which everything stays where they are computed."""
        resident = self.tiers.nearest.resident
        return sum(resident.issuperset(keys) for keys in self._layers)

    @property
    def layer_places(self) -> dict[tuple[str, int], int]:
        """Stack and layer -> the layer's place in a sweep over all stacks."""
        return {keys[0][:2]: place for place, keys in enumerate(self._layers)}

    def keys_of(self, units: Collection[int]) -> list[UnitKey]:
        """The keys of dense units that are counted over all stacks."""
        return [key for index, key in enumerate(self._cycle) if index in units]

    def begin_step(self, num_tokens: int) -> None:
        """The layers that are asked for next are for a step of so many tokens."""
        if self._shared is not None:
            self._shared.begin_step(num_tokens)

    def layers(self, stack: str = DECODER) -> Generator[LayerWeights, None, None]:
        """The layers of runs(), one by one."""
        with contextlib.closing(self.runs(stack, 1)) as sweep:
            for run in sweep:
                yield from run

    def runs(self, stack: str, most: int) -> Generator[list[LayerWeights], None, None]:
        """One sweep of a stack: the next layer, with the layers after it that stay in memory if it does, at
        most `most` together, and not across a border (_is_border). Their weights are valid, for what is
        launched on the lane, until the next ones are asked for.

        Raises what reading raised (CorruptFile); the layer is read anew in the next sweep.
        """
        self._num_sweeps += 1
        this_sweep = self._num_sweeps
        if self._lender is not None:
            self._lender.num_sweeps = this_sweep
        for buffer in self.tiers.take_back():
            self.lane.link.release(buffer)  # what a sweep that was given up has launched may still run
        try:
            yield from self._sweep(stack, this_sweep, most)
        finally:
            if this_sweep == self._num_sweeps:
                self._move_to(None)

    def _sweep(self, stack: str, this_sweep: int, most: int) -> Generator[list[LayerWeights], None, None]:
        index = next(index for index, keys in enumerate(self._layers) if keys[0].stack == stack)
        end = index + self._stacks[stack]
        while index < end:
            self._move_to(index)
            staying = self._staying_from(index, min(end, index + most))
            num_layers = max(1, len(staying))
            # Of layers that stay, the last unit tells the tier how far the sweep is.
            keys = self._layers[index + num_layers - 1][-1 if staying else 0 :]
            buffers: list[Tensor] = []
            try:
                for key in keys:
                    buffers.append(self._acquire(key))
                yield staying or [self._lend(index, buffers)]
            finally:
                # A sweep that was given up and is closed late takes nothing from the one that goes on.
                if this_sweep == self._num_sweeps:
                    for key, buffer in zip(keys, buffers, strict=False):  # the last one may have failed
                        self.lane.link.release(buffer)
                        self.tiers.nearest.release(key)
            index += num_layers

    def _move_to(self, layer: int | None) -> None:
        self.current_layer, self.moved_s = layer, time.monotonic()

    def _staying_from(self, first: int, end: int) -> list[LayerWeights]:
        """The layers from `first` on, and before `end`, that stay in memory and are there."""
        found = list[LayerWeights]()
        for index in range(first, end):
            weights = self._staying.get(index)
            if weights is None or (found and _is_border(found, weights)):
                break
            found.append(weights)
        return found

    def _lend(self, index: int, buffers: list[Tensor]) -> LayerWeights:
        """The weights of a layer in its buffers."""
        keys, settled = self._layers[index], self.tiers.nearest.settled
        weights = self._views.of(keys, buffers)
        if self._shared is None and all(settled(key) is not None for key in keys):
            self._staying[index] = weights
        return weights

    def _acquire(self, key: UnitKey) -> Tensor:
        """Wait for a dense unit."""
        tier = self.tiers.nearest
        stalled_before = tier.stall_s
        buffer = tier.acquire(key).buffer
        self.lane.link.acquire(buffer, tier.stall_s - stalled_before)
        return buffer

    def upper_planes(self) -> list[LayerWeights]:
        """LayerViews.upper_planes(), for drafts between two sweeps."""
        return self._views.upper_planes()

    def synchronize(self) -> None:
        """Until the lane has done everything, so that figures are complete."""
        self.lane.link.synchronize()
        if self._handover is not None:
            self._handover.check()

    def close(self) -> None:
        """Read nothing more, wait for what is being read into our buffers, and give back a GPU's memory. The
        host's memory is freed when this object and all views of its buffers are gone."""
        self.tiers.close()
        self.lane.close()
        self._views.clear()
        self._staying.clear()
        if self._lender is not None:
            self._lender.close()


def _is_border(run: Sequence[LayerWeights], following: LayerWeights) -> bool:
    """Whether a layer does not come together with these. Only layers that all have experts are computed in
    one call. So a run of layers without experts, with which many mixtures begin, ends before one that has
    experts, and several that have experts end before one without. Where the two kinds take turns, they come
    together, with what follows, as to lend several at once takes less time."""
    if following.expert_run is not None:
        return run[0].expert_run is None
    return len(run) > 1 and all(each.expert_run is not None for each in run)
