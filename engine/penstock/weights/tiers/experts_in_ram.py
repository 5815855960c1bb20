"""ExpertsInRam: the experts of a layer that the processor computes where they lie, beside a card.

An expert that the card has, that is on its way there, or that is to stay there is computed by the card. Of
the others, which lie in RAM, as many move to the card as pay, and those that come from the disk go on to the
card if that pays (ExpertRates.choose)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from penstock.memory.planning.expert_lanes import ExpertLoad, ExpertRates
from penstock.spec import UnitKey
from penstock.weights.tiers.demand_tier import DemandTier, Group
from penstock.weights.tiers.tier import Arrival

#: Slots of RAM that are never lent: one that the disk fills, and one that the link may still copy from. A
#: layer gives its experts in RAM back when it has got all others; these pass through the slots that are left.
PASSING_SLOTS = 2


class LentExperts(NamedTuple):
    """The experts of a layer that the processor computes: those in RAM, and those on their way there from the
    disk."""

    there: Group
    coming: Group
    #: The experts that the card computes. Those that come from the disk come last, so that the link does not
    #: wait for the disk while it has others to move.
    others: list[UnitKey]

    @property
    def all(self) -> Group:
        return self.there + self.coming


class ExpertsInRam:
    """`card` and `host` are tiers of the same experts. The card's tier takes its experts from the host's."""

    def __init__(self, card: DemandTier, host: DemandTier, rates: ExpertRates) -> None:
        self._card, self._host, self._rates = card, host, rates
        self._most_lent = max(0, host.num_slots - PASSING_SLOTS)
        #: Experts that were not given back yet, those of earlier layers among them.
        self._num_out = 0
        #: Experts that were lent since the start.
        self.num_lent = 0

    def lend(self, keys: Sequence[UnitKey], num_tokens: Sequence[int]) -> LentExperts:
        """A layer asks for these experts, each for so many tokens. Returns those of them that the processor
        computes, which stay in RAM until give_back(), and the others, which the layer gathers from the card's
        tier."""
        tokens = dict(zip(keys, num_tokens, strict=True))
        missing, card_s = self._missing(tokens)
        with self._host.arrivals:
            there = self._host.slots.arrived(missing)
            there = [each for each in there if not each[1].has_failed]
            absent = self._absent(missing, there)
            rows = [ExpertLoad(tokens[key]) for key, _ in there]
            choice = self._rates.choose(rows, card_s, [ExpertLoad(tokens[key]) for key in absent])
            num_moved = max(choice.num_moved, len(there) - self._most_lent)
            lent, coming = there[num_moved:], list[tuple[UnitKey, Arrival]]()
            self._host.slots.use(lent)  # give_back() tells when the processor has computed them
            room = self._most_lent - self._num_out - len(lent)
            if choice.stays and room > 0:
                coming += self._begin(absent[:room], tokens)
            for _, arrival in lent + coming:
                arrival.num_users += 1
                self._num_out += 1
            self._count(self._host, lent, coming)
        taken, late = {key for key, _ in lent + coming}, set(absent)
        others = sorted((key for key in keys if key not in taken), key=late.__contains__)
        with self._card.arrivals:
            self._count(self._card, lent + coming)
        self.num_lent += len(taken)
        return LentExperts(lent, coming, others)

    def arriving(self, coming: Group) -> Iterator[Group]:
        """Experts that lend() has lent and that come from the disk, in groups, as soon as they are there.
        Raises what reading raised."""
        waiting = list(coming)
        while waiting:
            with self._host.arrivals:
                while not any(arrival.read.done() for _, arrival in waiting):
                    if self._host.arrivals.is_closed:
                        raise RuntimeError("the engine was closed while its experts were in use")
                    self._host.arrivals.wait()
                there = [each for each in waiting if each[1].read.done()]
                for _, arrival in there:
                    arrival.read.result()
                self._host.slots.use(there)
            waiting = [each for each in waiting if each[0] not in dict(there)]
            yield there

    def give_back(self, group: Group) -> None:
        """The processor has computed these. On any thread."""
        with self._host.arrivals:
            for _, arrival in group:
                arrival.num_users -= 1
                self._num_out -= 1
            self._host.arrivals.changed()  # the link may wait for a slot

    def _absent(self, missing: Sequence[UnitKey], there: Group) -> list[UnitKey]:
        """Of the missing experts, those that have to come from the disk. What could not be read is not among
        them: the card's tier has it read anew."""
        present, units = {key for key, _ in there}, self._host.arrivals.units
        return [key for key in missing if key not in present and not (key in units and units[key].has_failed)]

    def _begin(
        self, keys: Sequence[UnitKey], asked: Mapping[UnitKey, int]
    ) -> Iterator[tuple[UnitKey, Arrival]]:
        """Those of these experts that are on their way from the disk, or begin to come while there is a slot:
        no expert that the layer has `asked` for gives its slot up."""
        arrivals, num_in_sweep = self._host.arrivals, len(asked) * len(self._host.num_units)
        for key in keys:
            if key not in arrivals.units:
                is_full = arrivals.is_closed or not arrivals.can_read
                if is_full or not self._host.slots.make_room(asked, num_in_sweep, takes_pinned=False):
                    return
                self._host.begin(key)
            yield key, arrivals.units[key]

    def _missing(self, tokens: dict[UnitKey, int]) -> tuple[list[UnitKey], float]:
        """Experts that the card lacks and needs not keep, those with the most tokens first; and the card's
        seconds for the others. What was guessed does not begin to move any more."""
        with self._card.arrivals:
            self._card.settle(tokens)
            units = self._card.arrivals.units
            missing = sorted((key for key in tokens if key not in units), key=lambda key: -tokens[key])
            staying = self._card.policy.pinned(missing)
            num_free = max(0, len(self._card.arrivals.free_slots) - len(staying))
        missing = [key for key in missing if key not in staying][num_free:]
        others = tokens.keys() - missing
        return missing, sum(self._rates.card_s(tokens[key]) for key in others)

    @staticmethod
    def _count(tier: DemandTier, there: Group, coming: Group | None = None) -> None:
        """These were asked for. Nothing had to be read for those that were there."""
        group = there + (coming or [])
        tier.uses.add(key for key, _ in group)
        tier.num_asked += len(group)
        tier.num_hits += len(there)
