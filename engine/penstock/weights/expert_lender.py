"""ExpertLender: the weights of experts that a layer asks for, where they are computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from penstock.kernels import Arriving
from penstock.kernels.sublayers.mixture_layer import ExpertsForRun
from penstock.memory.lane import Handover, Link
from penstock.memory.reads.ordered_reads import OrderedRead
from penstock.spec import UnitKey
from penstock.weights.expert_table import ExpertRun
from penstock.weights.expert_tables import ExpertTables
from penstock.weights.expert_views import ExpertViews
from penstock.weights.layer_weights import ExpertGroup, LayerWeights
from penstock.weights.tensors import Unit
from penstock.weights.tiers.demand_tier import DemandTier, Group
from penstock.weights.tiers.experts_in_ram import ExpertsInRam


class ExpertLender:
    """Lends experts in groups. One group at a time is in use."""

    def __init__(
        self,
        units: Mapping[UnitKey, Unit],
        tier: DemandTier,
        link: Link,
        in_ram: ExpertsInRam | None = None,
        handover: Handover | None = None,
    ) -> None:
        """`in_ram`: the processor computes some experts beside a card, by what `handover` brings."""
        self._tier = tier
        self._link = link
        self._in_ram, self._handover = in_ram, handover
        self._views = ExpertViews(units)
        self._tables = ExpertTables(tier, self._views)
        #: The keys of each layer's experts, by their numbers. Hundreds are asked for in a step.
        self._keys: dict[UnitKey, list[UnitKey]] = {}
        #: Guessed units of a run that were being read when it began.
        self._coming = Group()
        #: Sweeps that began. What a sweep that was given up has lent belongs to the next one.
        self.num_sweeps = 0

    def groups(
        self, layer: UnitKey, numbers: Sequence[int], num_tokens: Sequence[int]
    ) -> Iterator[ExpertGroup]:
        """LayerWeights.expert_groups() of a layer."""
        keys = self._keys_of(layer, numbers)
        if self._in_ram is None or not num_tokens:
            yield from self._nearest(keys)
            return
        lent = self._in_ram.lend(keys, num_tokens)
        try:
            if lent.there:
                yield self._group_in_ram(lent.there)
            yield from self._nearest(lent.others)
            if lent.there:
                yield []
            for group in self._in_ram.arriving(lent.coming):
                yield self._group_in_ram(group)
                yield []
        finally:
            if lent.all and self._handover is not None:
                self._handover.then(partial(self._in_ram.give_back, lent.all))

    def _nearest(self, keys: Sequence[UnitKey]) -> Iterator[ExpertGroup]:
        """Experts that are computed on the lane itself."""
        tier, this_sweep, stalled_before = self._tier, self.num_sweeps, self._tier.stall_s
        for group in tier.gather(keys):
            waited_s = tier.stall_s - stalled_before
            for _, arrival in group:
                self._link.acquire(arrival.buffer, waited_s)
                waited_s = 0.0
            try:
                yield [(key.expert or 0, self._views.of(key, arrival)) for key, arrival in group]
            finally:
                if this_sweep == self.num_sweeps:
                    for _, arrival in group:
                        self._link.release(arrival.buffer)
            stalled_before = tier.stall_s

    @property
    def lends_arriving(self) -> bool:
        """Whether experts can be lent while they are read, and found by kernels. Reads that are not ordered
        begin one guess at a time, and none while kernels compute with the experts. So they are served this
        way only where each expert has a slot, and nothing is guessed."""
        is_free = self._tier.is_ordered or self._tier.holds_all
        return self._tier.is_alone and self._in_ram is None and is_free

    def take_present(self, layer: UnitKey, numbers: Sequence[int]) -> list[LayerWeights] | None:
        """LayerWeights.take_present of a layer."""
        keys = self._keys_of(layer, numbers)
        found = self._tier.take_present(keys)
        if found is None:
            return None
        self._tables.put(list(zip(keys, found, strict=True)))
        return [each.views or self._views.of(key, each) for key, each in zip(keys, found, strict=True)]

    def arriving_groups(
        self, layer: UnitKey, numbers: Sequence[int]
    ) -> Iterator[tuple[ExpertGroup, Arriving | None]]:
        """LayerWeights.arriving_groups() of a layer."""
        tier, stalled_before, group = self._tier, self._tier.stall_s, Group()
        for group, arriving in tier.gather_arriving(self._keys_of(layer, numbers)):
            lent = [(key.expert or 0, each.views or self._views.of(key, each)) for key, each in group]
            yield lent, arriving
            self._tables.put(group)
        if group:  # the host's link only counts, and what was waited for is known afterwards
            self._link.acquire(group[0][1].buffer, tier.stall_s - stalled_before)

    def run(self, layer: UnitKey) -> ExpertRun:
        """LayerWeights.expert_run of a layer."""
        return ExpertRun(self._tables.of(layer), self._begin_run, self._end_run, layer)

    def _begin_run(self) -> ExpertsForRun:
        coming, wait, reads = list[tuple[int, int, int, int]](), 0, 0
        self._coming = self._tier.begin_run()
        for key, each in self._coming:
            read, record = each.read, self._tables.record(each.views or self._views.of(key, each))
            ticket = read.ticket if isinstance(read, OrderedRead) and not each.has_ended else -1
            if isinstance(read, OrderedRead) and ticket >= 0 and record is not None:
                coming.append((self._tables.of(key).address, key.expert or 0, record.address, ticket))
                wait, reads = read.reads.wait_address, read.reads.address
        self._tables.put(self._coming)
        return ExpertsForRun(self._tables.row_bytes, coming, wait, reads)

    def _end_run(self, asked: Sequence[tuple[UnitKey, Sequence[int]]]) -> None:
        coming, self._coming = self._coming, []
        try:
            for key, each in coming:
                each.is_there = each.is_there or (key.expert or 0) in self._tables.of(key)
            self._tables.put(coming)
        finally:
            self._tier.end_run([self._keys_of(*numbers) for numbers in asked])

    @property
    def takes_guesses(self) -> bool:
        """Whether guesses of experts can save time: some are not in memory."""
        return not self._tier.holds_all

    def expect(self, layer: UnitKey, numbers: Sequence[int]) -> None:
        """NextExperts.expect() with the layer that is guessed for."""
        self._tier.expect(self._keys_of(layer, numbers))

    def close(self) -> None:
        """Forget the views, which keep buffers."""
        self._views.clear()
        self._tier.slots.tables.clear()

    def _keys_of(self, layer: UnitKey, numbers: Sequence[int]) -> list[UnitKey]:
        keys = self._keys.get(layer)
        if keys is None:
            keys = self._keys[layer] = [
                UnitKey(*layer[:2], number) for number in range(self._tier.num_units[layer[:2]])
            ]
        return [keys[number] for number in numbers]

    def _group_in_ram(self, group: Group) -> ExpertGroup:
        return [(key.expert or 0, self._views.in_ram(key, arrival)) for key, arrival in group]
