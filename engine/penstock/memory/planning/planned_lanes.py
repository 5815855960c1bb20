"""PlannedLanes: where a step's experts are expected to be computed, by their popularity. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from penstock.memory.planning.expert_demand import ExpertDemand
from penstock.memory.planning.expert_lanes import ExpertLoad, ExpertRates
from penstock.memory.planning.popularity import chosen_shares, hit_rate, step_shares, weights_of
from penstock.spec import ExpertFootprint


class PlannedLanes(NamedTuple):
    """A step's experts, of all layers together."""

    demand: ExpertDemand
    #: The processor's seconds, crossings among them.
    processor_s: float = 0.0
    #: How often a token passes through an expert that the processor computes.
    num_passes: float = 0.0
    #: What layers wait for the last expert from the disk when it is in RAM.
    behind_disk_s: float = 0.0

    def of(self, num_in_ram: float) -> tuple[float, float]:
        """The processor's seconds and passes if it computes so many experts in place of those that are
        expected."""
        expected = self.demand.num_in_ram
        factor = num_in_ram / expected if expected else 0.0
        return factor * self.processor_s, factor * self.num_passes


@lru_cache(maxsize=256)
def planned_lanes(
    experts: ExpertFootprint, rates: ExpertRates, num_tokens: int, num_slots: int, num_host_slots: int
) -> PlannedLanes:
    """What a step of `num_tokens` tokens should ask for when the slots are full. The card pins the most
    popular experts; its hits are taken for those that a cache has without the processor. Of the others, what
    is in RAM is moved to the card or computed by the processor, and so is what comes from the disk."""
    if not num_tokens:
        return PlannedLanes(ExpertDemand())
    num_layers = experts.count / experts.per_layer
    shares = sorted(chosen_shares(weights_of(experts), experts.count_per_token / num_layers), reverse=True)
    asked = step_shares(shares, num_tokens)
    ranked = [
        ExpertLoad(num_tokens * share / each, each) for share, each in zip(shares, asked, strict=True) if each
    ]
    on_card, missing = _cut(ranked, num_slots / num_layers)
    num_missing = sum(asked) * (1 - hit_rate(asked, num_slots / num_layers))
    missing = _times(missing, num_missing / _count(missing)) if missing else []
    on_card = _times(on_card, (sum(asked) - num_missing) / _count(on_card)) if on_card else []
    num_from_disk = sum(asked) * (1 - hit_rate(asked, max(num_slots, num_host_slots) / num_layers))
    share_in_ram = 1 - min(1.0, num_from_disk / num_missing) if num_missing else 0.0
    there = _times(missing, share_in_ram) if share_in_ram else []
    coming = _times(missing, 1 - share_in_ram) if share_in_ram < 1 else []
    card_s = sum(each.number * rates.card_s(each.num_tokens) for each in on_card)
    num_moved, stays = rates.choose(there, card_s, coming)
    moved, computed, staying = there[:num_moved], there[num_moved:], coming if stays else []
    num_in_ram = _count(computed) + _count(staying)
    demand = ExpertDemand(
        num_layers * sum(asked),
        num_layers * (num_missing - num_in_ram),
        num_layers * _count(coming),
        num_layers * num_in_ram,
    )
    last_s = rates.alone_s(coming[0]) if stays else rates.move_s
    behind_disk_s = num_layers * min(1.0, _count(coming)) * last_s if coming else 0.0
    seconds = sum(each.number * rates.alone_s(each) for each in staying)
    if computed:
        seconds += rates.crossings_s + rates.processor_window_s(computed, rates.move_s * _count(moved))
    num_passes = num_layers * sum(each.number * each.num_tokens for each in (*computed, *staying))
    return PlannedLanes(demand, num_layers * seconds, num_passes, behind_disk_s)


def _count(experts: Sequence[ExpertLoad]) -> float:
    return sum(each.number for each in experts)


def _times(experts: Sequence[ExpertLoad], factor: float) -> list[ExpertLoad]:
    return [each._replace(number=each.number * factor) for each in experts]


def _cut(ranked: Sequence[ExpertLoad], num_slots: float) -> tuple[list[ExpertLoad], list[ExpertLoad]]:
    """The first `num_slots` experts, and the others. A slot may be shared by layers."""
    whole, part = int(num_slots), num_slots % 1
    first, others = list(ranked[:whole]), list(ranked[whole:])
    if part and others:
        border = others[0]
        first.append(border._replace(number=border.number * part))
        others[0] = border._replace(number=border.number * (1 - part))
    return first, others
