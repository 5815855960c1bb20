"""Which experts that lie in RAM a layer moves to the card, and which ones the processor computes where they
lie. Pure.

Moving an expert takes the same time for one token and for many; computing an expert takes longer with more
tokens. So the experts with the most tokens move, and the question is how many. Both lanes work at the same
time, and a layer waits for the later one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from penstock.memory.hardware import HardwareProfile, ProductRates
from penstock.memory.planning.product_times import product_s
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

    @property
    def move_s(self) -> float:
        return self.num_bytes / self.link_bps

    def layer_s(self, experts: Sequence[ExpertLoad], num_moved: int, card_s: float = 0.0) -> float:
        """The experts of a layer, if the link moves the first `num_moved` of `experts`, which lie in RAM, and
        the processor computes the others. The experts that the card has already take `card_s`.

            t(k) = max(card_s + card(first k), k * move + card(k-th), crossings + slowed(processor(others)))
        """
        moved, computed = experts[:num_moved], experts[num_moved:]
        moving_s = self.move_s * sum(each.number for each in moved)
        at_once_s = card_s + sum(each.number * self.card_s(each.num_tokens) for each in moved)
        last_s = self.card_s(moved[-1].num_tokens) if moved else 0.0
        there_s = self.crossings_s + self.processor_window_s(computed, moving_s) if computed else 0.0
        return max(at_once_s, moving_s + last_s, there_s)

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

    def num_moved(self, experts: Sequence[ExpertLoad], card_s: float = 0.0) -> int:
        """How many of `experts` (those with the most tokens come first), which lie in RAM, the link moves, so
        that layer_s() is least. Of equal numbers, the smallest. The others have at most MOST_TOKENS."""

        def sums(amount: Callable[[ExpertLoad], float]) -> list[float]:
            """Of the first 0, 1, 2, ... experts."""
            return [0.0, *itertools.accumulate(each.number * amount(each) for each in experts)]

        counts, tokens = sums(lambda each: 1), sums(lambda each: each.num_tokens)
        cards = sums(lambda each: self.card_s(each.num_tokens))
        alone = sums(lambda each: self.processor_s(each.num_tokens))
        last = [0.0, *(self.card_s(each.num_tokens) for each in experts)]
        best, best_s = len(experts), float("inf")
        for number in range(len(experts) + 1):
            if tokens[-1] - tokens[number] > MOST_TOKENS:
                continue
            moving_s = counts[number] * self.move_s
            there_s = 0.0
            if number < len(experts):
                left = counts[-1] - counts[number]
                there_s = self.crossings_s + self._slowed(alone[-1] - alone[number], left, moving_s)
            seconds = max(card_s + cards[number], moving_s + last[number], there_s)
            if seconds < best_s:
                best, best_s = number, seconds
        return best


@lru_cache(maxsize=16)
def expert_rates(
    experts: ExpertFootprint, hardware: HardwareProfile, rows_per_token: int
) -> ExpertRates | None:
    """The rates of a machine with a card. None if a rate is unknown."""
    lane = hardware.lane
    known = (lane.memory_gbps, lane.link_gbps, lane.int8_gops, hardware.memory_read_gbps, hardware.int8_gops)
    if not (lane.has_own_memory and experts.count and all(known)):
        return None
    processor = _seconds(experts, hardware.products, hardware.memory_read_gbps, hardware.int8_gops)
    card = _seconds(experts, lane.products, lane.memory_gbps, lane.int8_gops)
    return ExpertRates(
        experts.num_bytes,
        lane.link_gbps * 1e9,
        hardware.memory_read_gbps * 1e9,
        lambda num_tokens: CALLS_S + processor(rows_per_token * num_tokens),
        lambda num_tokens: card(rows_per_token * num_tokens),
        CROSSINGS_PER_LAYER * lane.crossing_s,
    )


def _seconds(
    experts: ExpertFootprint, products: ProductRates, memory_gbps: float, int8_gops: float
) -> Callable[[float], float]:
    """Seconds of an expert's products by the rows of activations, by measured rates of products or by what
    memory and arithmetic allow."""

    @cache
    def seconds(rows: int) -> float:
        if products:
            return product_s(products, experts.num_bytes, experts.elements, rows)
        return max(experts.num_bytes / memory_gbps, 2 * rows * experts.elements / int8_gops) / 1e9

    return lambda rows: seconds(max(1, round(rows)))
