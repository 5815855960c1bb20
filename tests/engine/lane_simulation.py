"""A card and a processor that share products, in virtual time: the plain twin of product_split.py's formula.

Nothing here knows the formula. A step goes through its layers in order. A layer's products run one after the
other; the card's part and the processor's part of a product run side by side, and both must be done before
the next product. The link brings layers ahead, into a ring of slots; it reads the RAM first, and the
processor reads with the rest of the RAM's rate. Experts that move go first.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.memory.planning.expert_lanes import ExpertRates
from penstock.memory.planning.product_split import SplitStep


@dataclass
class _Link:
    """Brings the streamed part of each layer, in order, and stops where no slot is free."""

    layer_bytes: float
    num_layers: int
    num_slots: int
    rate: float
    brought: float = 0.0
    num_released: int = 0

    @property
    def is_busy(self) -> bool:
        limit = min(self.num_layers, self.num_released + self.num_slots) * self.layer_bytes
        return self.brought < limit - 1e-6

    def seconds_to(self, amount: float) -> float:
        return max(0.0, amount - self.brought) / self.rate

    @property
    def next_stop_s(self) -> float:
        limit = min(self.num_layers, self.num_released + self.num_slots) * self.layer_bytes
        return self.seconds_to(limit)

    def run(self, seconds: float) -> None:
        if self.is_busy:
            self.brought += seconds * self.rate


def step_seconds(
    step: SplitStep, share: float, num_layers: int, num_products: int, num_slots: int = 2
) -> float:
    """Seconds of one step, in the middle of others like it: the first slots are full when it begins."""
    streamed, kept = share * step.rest_bytes / num_layers, step.kept_bytes / num_layers
    computed = (1 - share) * step.rest_bytes / num_layers / num_products
    card_s = (kept + streamed) / num_products / step.card_bps
    streamed *= step.link_share  # the card has the upper planes of these channels
    # The link has to bring as much as a step takes, whichever step it is for.
    link = _Link(streamed, num_layers + num_slots, num_slots, step.link_bps, num_slots * streamed)
    crossing_s = step.crossings_s / num_layers / num_products if computed else 0.0
    time = 0.0

    def idle(seconds: float) -> None:
        nonlocal time
        while seconds > 1e-12:
            part = min(seconds, link.next_stop_s) if link.is_busy else seconds
            link.run(part)
            time, seconds = time + part, seconds - part

    moving_s = step.moved_bytes / step.link_bps / num_layers
    for layer in range(num_layers):
        idle(step.other_s / num_layers - moving_s)
        time += moving_s  # the link brings experts, and nothing of the rest
        while link.brought < (layer + 1) * streamed - 1e-6:
            idle(link.seconds_to((layer + 1) * streamed))
        for _ in range(num_products):
            idle(crossing_s)
            left, began = computed, time
            while left > 1e-6:
                rate = step.memory_bps - (step.link_bps if link.is_busy else 0.0)
                rate = min(step.processor_bps, rate)
                part = min(left / rate, link.next_stop_s) if link.is_busy else left / rate
                left -= rate * part
                idle(part)
            idle(began + card_s - time)
        link.num_released += 1
    while (
        link.brought < link.num_layers * streamed - 1e-6
    ):  # what the next step finds has to be there as well
        idle(link.next_stop_s)
    return time


def experts_seconds(
    rates: ExpertRates,
    experts: list[tuple[float, float]],
    moved: set[int],
    card_s: float,
    coming: list[tuple[float, float]] | None = None,
    stays: bool = False,
) -> float:
    """Seconds of a layer's experts that lie in RAM, each with its seconds on the processor and on the card,
    of which some are `moved`. The link brings these one after the other. The card computes each when it is
    there, after its own experts (`card_s`). The processor computes the others one after the other, and reads
    with what the link leaves of the RAM's rate.

    The disk brings the `coming` experts to RAM, one after the other. Either each of them moves to the card as
    soon as it is there and the link has brought the others. Or it `stays`, and the processor computes each
    when it is there, the link has brought the others, and the processor has nothing else to do."""
    move_s = rates.num_bytes / rates.link_bps
    link_s = len(moved) * move_s
    card_free = card_s
    for place, number in enumerate(sorted(moved), 1):
        card_free = max(card_free, place * move_s) + experts[number][1]
    arrivals = [
        (place * rates.num_bytes / rates.disk_bps, each) for place, each in enumerate(coming or (), 1)
    ]
    link_free = link_s
    for arrival_s, (_, on_card) in () if stays else arrivals:
        link_free = max(link_free, arrival_s) + move_s
        card_free = max(card_free, link_free) + on_card
    others = [own for number, (own, _) in enumerate(experts) if number not in moved]
    time = rates.crossings_s if others else 0.0
    for own in others:
        rate = rates.num_bytes / own
        slow = min(rate, max(0.0, rates.memory_bps - rates.link_bps)) / rate
        beside_link = max(0.0, link_s - time)
        time += own / slow if own <= slow * beside_link else own + (1 - slow) * beside_link
    time = max(time, link_s) if stays else time
    for arrival_s, (own, _) in arrivals if stays else ():
        time = max(time, arrival_s) + rates.crossings_s + own
    return max(time, card_free)
