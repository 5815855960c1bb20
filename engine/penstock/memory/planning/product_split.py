"""How the products of a layer are divided between a card and the processor. Pure.

A matrix's output channels lie in three parts. The first ones are kept in the card's memory. Of the rest,
which lies in RAM, the card computes what the link brings in time, and the processor computes the others where
they lie, at the same time. Sums of integers are exact, so that no division changes a bit, and each step takes
the one that its number of tokens calls for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

#: The streamed share of a step is a multiple of one in so many.
SHARE_STEPS = 64
#: Kept channels, and streamed ones, are whole multiples of so many: rows that kernels compute together.
ROW_UNIT = 16


@dataclass(frozen=True)
class SplitStep:
    """What a step computes, with the rates for its number of tokens. Bytes are those of layers' matrices;
    rates are bytes a second; a rate may be infinite."""

    #: In the card's memory, and in RAM.
    kept_bytes: float
    rest_bytes: float
    link_bps: float
    #: RAM, whose rate the link's copies and the processor share.
    memory_bps: float
    #: Bytes of weights that pass through products with this step's rows.
    card_bps: float
    processor_bps: float
    #: Seconds of all that is no product; the card computes, the processor is idle, the link works.
    other_s: float = 0.0
    #: Seconds of all crossings, where the processor has a share.
    crossings_s: float = 0.0
    #: Seconds of the launches that such products take, for which the card waits: what it computes between two
    #: crossings of few tokens has ended before the next launch.
    launches_s: float = 0.0
    #: Experts that move to the card, which the link carries beside the rest; `other_s` has time for them.
    moved_bytes: float = 0.0
    #: Of the rest's streamed bytes, those that the link carries: the card has the others, which are upper
    #: planes, already.
    link_share: float = 1.0

    def seconds(self, share: float) -> float:
        """The step if `share` of the rest is streamed and the processor computes the others.

            window = max(((1 - x) S + slowed) / processor, (K + x S) / card)
            t(x)   = max((x l S + moved) / link, other + crossings + launches + window)

        Products wait for each other and for the card's other work, so that the processor computes in the
        window alone, and the link works all the time. While the link copies, it takes its rate of what RAM
        delivers, and the processor reads with the rest: `slowed` are the bytes that it could have read
        else."""
        streamed = share * self.rest_bytes
        outside_s = self.other_s + (self.sharing_s if share < 1 else 0.0)
        carried = self.link_share * streamed + self.moved_bytes
        inside = max(0.0, carried - self.link_bps * outside_s)
        computing_s = (self.rest_bytes - streamed + inside * self._slowed) / self._processor
        window_s = max(computing_s, (self.kept_bytes + streamed) / self.card_bps)
        return max(carried / self.link_bps, outside_s + window_s)

    @property
    def sharing_s(self) -> float:
        """Seconds that sharing costs, however little the processor computes."""
        return self.crossings_s + self.launches_s

    @property
    def _processor(self) -> float:
        return min(self.processor_bps, self.memory_bps)

    @property
    def _slowed(self) -> float:
        """What the processor does not read meanwhile, for each byte that the link copies."""
        left = max(0.0, self.memory_bps - self.link_bps)
        return max(0.0, self._processor - left) / self.link_bps

    def best_share(self) -> float:
        """The share with the shortest step, in closed form: t(x) is the largest of a few straight lines, so
        that its minimum is at an end or where two of them meet. Of equal steps, the one that streams less."""
        return min(sorted(self._candidates()), key=self.seconds)

    def _candidates(self) -> Iterator[float]:
        yield from (0.0, 1.0)
        if not self.rest_bytes:
            return
        rest, outside, processor = self.rest_bytes, self.other_s + self.sharing_s, self._processor
        over_link = self.link_share * rest
        slowed = self._slowed * over_link / processor
        lines = (  # (seconds at a share of 0, what a share of 1 adds)
            (self.moved_bytes / self.link_bps, over_link / self.link_bps),
            (outside + self.kept_bytes / self.card_bps, rest / self.card_bps),
            (outside + rest / processor, -rest / processor),
            # The same, with what the link copies in the window.
            (
                outside
                + rest / processor
                - slowed * (self.link_bps * outside - self.moved_bytes) / over_link,
                slowed - rest / processor,
            ),
        )
        for (first, first_slope), (second, second_slope) in itertools.combinations(lines, 2):
            if first_slope != second_slope:
                share = (second - first) / (first_slope - second_slope)
                if 0 < share < 1:
                    yield share


def whole_share(share: float) -> float:
    """The next multiple of 1 / SHARE_STEPS; a step takes one of these, so that there are few."""
    return round(share * SHARE_STEPS) / SHARE_STEPS


def part_rows(num_rows: int, share: float) -> int:
    """How many of so many output channels are a share of them, in whole units; all or none where the share is
    1 or 0."""
    if share >= 1:
        return num_rows
    return int(share * num_rows) // ROW_UNIT * ROW_UNIT
