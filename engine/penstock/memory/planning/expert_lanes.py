"""Which experts that lie in RAM a layer moves to the card, and which ones the processor computes where they
lie. Pure.

Moving an expert takes the same time for one token and for many; computing an expert takes longer with more
tokens. So the experts with the most tokens move, and the question is how many. Both lanes work at the same
time, and a layer waits for the later one. Experts that come from the disk pass through RAM: either all of a
layer's go on to the card, or the processor computes each of them when it is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from penstock.memory.hardware import HardwareProfile, LaneProfile
from penstock.memory.planning.product_times import multiply_s
from penstock.spec import ExpertFootprint

#: Crossings of a layer: gate and up are computed on the processor, the activation on the card, down on the
#: processor.
CROSSINGS_PER_LAYER = 2
#: Seconds of the processor's two calls for an expert: 16 to 27 us for an expert of 64 by 64, whose products
#: take next to nothing, on one of two cores.
CALLS_S = 30e-6
#: Tokens for which the processor computes experts of a layer, an expert's tokens each counted: the card holds
#: the activations of all of them at once.
MOST_TOKENS = 512


class Choice(NamedTuple):
    """Who computes the experts of a layer that the card lacks."""

    #: Of those in RAM, so many that move to the card, those with the most tokens first.
    num_moved: int
    #: Those that come from the disk stay in RAM, where the processor computes them.
    stays: bool


class ExpertLoad(NamedTuple):
    """An expert, and how many tokens pass through it."""

    num_tokens: float
    #: How many such experts there are. A plan expects parts of one.
    number: float = 1.0


@dataclass(frozen=True)
class ExpertRates:
    """What an expert of one size costs on a machine."""

    num_bytes: float
    link_bps: float
    #: RAM, whose rate the link's copies and the processor share.
    memory_bps: float
    #: Seconds of an expert with so many tokens.
    processor_s: Callable[[float], float]
    card_s: Callable[[float], float]
    #: Seconds on the way from the card to the processor and back, in a layer.
    crossings_s: float
    #: Reads of experts from the disk; 0: not known, and what comes from there goes on to the card.
    disk_bps: float = 0.0

    @property
    def move_s(self) -> float:
        return self.num_bytes / self.link_bps

    @property
    def disk_s(self) -> float:
        return self.num_bytes / self.disk_bps if self.disk_bps else 0.0

    def layer_s(
        self,
        experts: Sequence[ExpertLoad],
        num_moved: int,
        card_s: float = 0.0,
        coming: Sequence[ExpertLoad] = (),
        stays: bool = False,
    ) -> float:
        """The experts of a layer, if the link moves the first `num_moved` of `experts`, which lie in RAM, and
        the processor computes the others. The experts that the card has already take `card_s`.

            t(k) = max(card_s + card(first k), k * move + card(k-th), crossings + slowed(processor(others)))

        The `coming` experts come from the disk, one after the other. Either each moves to the card when it is
        there and the link has moved the k and those before it. Or they stay in RAM (`stays`), where the
        processor computes each when it is there and the processor is done with all before it."""
        moved, computed = experts[:num_moved], experts[num_moved:]
        moving_s = self.move_s * sum(each.number for each in moved)
        last_s = self.card_s(moved[-1].num_tokens) if moved else 0.0
        card_s += sum(each.number * self.card_s(each.num_tokens) for each in moved)
        there_s = self.crossings_s + self.processor_window_s(computed, moving_s) if computed else 0.0
        return self._with_coming_s(coming, stays, moving_s, max(card_s, moving_s + last_s), there_s)

    def _with_coming_s(
        self, coming: Sequence[ExpertLoad], stays: bool, moving_s: float, card_s: float, there_s: float
    ) -> float:
        """A layer in which link, card and processor have other experts until `moving_s`, `card_s` and
        `there_s`."""
        from_disk_s = 0.0
        there_s = max(there_s, moving_s) if stays and coming else there_s
        for each in coming:
            from_disk_s += each.number * self.disk_s
            if stays:
                there_s = max(there_s, from_disk_s) + each.number * self.alone_s(each)
            else:
                moving_s = max(moving_s, from_disk_s) + each.number * self.move_s
                card_s = max(card_s, moving_s) + each.number * self.card_s(each.num_tokens)
        return max(card_s, there_s)

    def alone_s(self, expert: ExpertLoad) -> float:
        """The processor's seconds for an expert that it computes by itself."""
        return self.crossings_s + self.processor_s(expert.num_tokens)

    def processor_window_s(self, experts: Sequence[ExpertLoad], moving_s: float = 0.0) -> float:
        """The processor's seconds for these experts, while the link copies for the first `moving_s` of them.
        Meanwhile the processor, which begins after a crossing, reads with what the link leaves of the RAM's
        rate."""
        alone_s = sum(each.number * self.processor_s(each.num_tokens) for each in experts)
        return self._slowed(alone_s, sum(each.number for each in experts), moving_s)

    def _slowed(self, alone_s: float, count: float, moving_s: float) -> float:
        if not alone_s:
            return 0.0
        moving_s = max(0.0, moving_s - self.crossings_s)
        rate, left = count * self.num_bytes / alone_s, max(0.0, self.memory_bps - self.link_bps)
        share = min(1.0, left / rate)
        if share and alone_s <= share * moving_s:
            return alone_s / share
        return alone_s + (1 - share) * moving_s

    def choose(
        self, experts: Sequence[ExpertLoad], card_s: float = 0.0, coming: Sequence[ExpertLoad] = ()
    ) -> Choice:
        """The choice with the least layer_s(). Of `experts` and of `coming`, those with the most tokens come
        first. Of equal choices, the one that moves fewest. The processor gets at most MOST_TOKENS."""
        tokens = [0.0, *itertools.accumulate(each.number * each.num_tokens for each in (*experts, *coming))]
        total, best, best_s = tokens[len(experts)], Choice(len(experts), False), float("inf")
        for stays in (True, False) if coming and self.disk_bps else (False,):
            most = MOST_TOKENS - (tokens[-1] - total if stays else 0.0)
            seconds = self._layer_s_of(experts, card_s, coming, stays)
            for number in range(len(experts) + 1):
                if total - tokens[number] <= most and (found_s := seconds(number)) < best_s:
                    best, best_s = Choice(number, stays), found_s
        return best

    def _layer_s_of(
        self, experts: Sequence[ExpertLoad], card_s: float, coming: Sequence[ExpertLoad], stays: bool
    ) -> Callable[[int], float]:
        """layer_s() by the number of experts that move, in a few additions for each."""

        def sums(amount: Callable[[ExpertLoad], float]) -> list[float]:
            """Of the first 0, 1, 2, ... experts."""
            return [0.0, *itertools.accumulate(each.number * amount(each) for each in experts)]

        counts, cards = sums(lambda each: 1), sums(lambda each: self.card_s(each.num_tokens))
        alone = sums(lambda each: self.processor_s(each.num_tokens))
        last = [0.0, *(self.card_s(each.num_tokens) for each in experts)]

        def seconds(number: int) -> float:
            moving_s, there_s = counts[number] * self.move_s, 0.0
            if number < len(experts):
                left = counts[-1] - counts[number]
                there_s = self.crossings_s + self._slowed(alone[-1] - alone[number], left, moving_s)
            on_card_s = max(card_s + cards[number], moving_s + last[number])
            return self._with_coming_s(coming, stays, moving_s, on_card_s, there_s)

        return seconds


@lru_cache(maxsize=16)
def expert_rates(
    experts: ExpertFootprint, hardware: HardwareProfile, rows_per_token: int
) -> ExpertRates | None:
    """The rates of a machine with a card. None if a rate is unknown."""
    lane = hardware.lane
    known = (lane.memory_gbps, lane.link_gbps, lane.int8_gops, hardware.memory_read_gbps, hardware.int8_gops)
    if not (lane.has_own_memory and experts.count and all(known)):
        return None
    processor, card = _seconds(experts, hardware.processor), _seconds(experts, lane)
    return ExpertRates(
        experts.num_bytes,
        lane.link_gbps * 1e9,
        hardware.memory_read_gbps * 1e9,
        lambda num_tokens: CALLS_S + processor(rows_per_token * num_tokens),
        lambda num_tokens: card(rows_per_token * num_tokens),
        CROSSINGS_PER_LAYER * lane.crossing_s,
        hardware.disk.read_gbps * 1e9 if hardware.disk else 0.0,
    )


def _seconds(experts: ExpertFootprint, lane: LaneProfile) -> Callable[[float], float]:
    """Seconds of an expert's products by the rows of activations."""

    @cache
    def seconds(rows: int) -> float:
        return multiply_s(lane, experts.num_bytes, experts.elements, rows, experts.formats)

    return lambda rows: seconds(max(1, round(rows)))
