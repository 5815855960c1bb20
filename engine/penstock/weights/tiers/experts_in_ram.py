"""ExpertsInRam: the experts of a layer that the processor computes where they lie, beside a card.

An expert that the card has, or that is on its way there, is computed by the card. So is an expert that has
to come from the disk: the link is faster than the disk. Of the others, which all lie in RAM, those move to
the card that are to stay there, and as many more as pay (ExpertRates.num_moved)."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.memory.planning.experts.expert_lanes import ExpertLoad, ExpertRates
from penstock.spec import UnitKey
from penstock.weights.tiers.demand_tier import DemandTier, Group


class ExpertsInRam:
    """`card` and `host` are tiers of the same experts. The card's tier takes its experts from the host's."""

    def __init__(self, card: DemandTier, host: DemandTier, rates: ExpertRates) -> None:
        self._card, self._host, self._rates = card, host, rates
        #: Experts that were lent since the start.
        self.num_lent = 0

    def lend(self, keys: Sequence[UnitKey], num_tokens: Sequence[int]) -> Group:
        """A layer asks for these experts, each for so many tokens. Returns those of them that the processor
        computes, which stay in RAM until give_back(). The layer gathers the others from the card's tier."""
        tokens = dict(zip(keys, num_tokens, strict=True))
        missing, card_s = self._missing(tokens)
        with self._host.arrivals:
            there = self._host.slots.arrived(missing)
            there = [each for each in there if not self._host.slots.has_failed(each[0])]
            rows = [ExpertLoad(tokens[key]) for key, _ in there]
            lent = there[self._rates.num_moved(rows, card_s) :] if there else []
            self._host.slots.lend(lent)
            for _, arrival in lent:
                arrival.is_lent = False  # to the link, which has none of them
                arrival.num_users += 1
            self._count(self._host, lent)
        with self._card.arrivals:
            self._count(self._card, lent)
        self.num_lent += len(lent)
        return lent

    def give_back(self, group: Group) -> None:
        """The processor has computed these. On any thread."""
        with self._host.arrivals:
            for _, arrival in group:
                arrival.num_users -= 1
            self._host.arrivals.changed()  # the link may wait for a slot

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
    def _count(tier: DemandTier, group: Group) -> None:
        """These were asked for, and nothing had to be read for them."""
        tier.uses.add(key for key, _ in group)
        tier.num_asked += len(group)
        tier.num_hits += len(group)
