"""Rounds: how long the chains should be that a small model guesses before a larger one judges all of them in
one pass. Pure.

A pass over a few rows takes hardly longer than over one, as long as reading the weights binds it. So a chain
of guesses makes several levels of the larger model's guesses known for the price of one. Each further link
takes a level of the small model and a row of the pass, and is worth less, since all links before it have to
be right.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List

#: Most guesses of a chain.
MAX_LINKS = 16


class Round:
    """Chains behind some places, link by link."""

    def __init__(
        self,
        small_s: Callable[[int], float],
        pass_s: Callable[[int], float],
        chances: List[float],
        max_rows: int,
    ) -> None:
        """small_s: places -> seconds of a level of the small model. pass_s: rows -> seconds of a pass of the
        larger one. chances: that what is known behind each place will be of use. max_rows: of a pass."""
        self._small_s, self._pass_s, self._max_rows = small_s, pass_s, max_rows
        self._num_rows, self._drafted_s, self._worth = len(chances), 0.0, sum(chances)
        self._num_links = 0

    @property
    def seconds(self) -> float:
        """Of the small model's levels so far, and of a pass."""
        return self._drafted_s + self._pass_s(self._num_rows)

    def extend(self, chances: List[float]) -> int:
        """Chains may grow by a link each, which will be of use with these chances, the largest first. Returns
        how many of them should, the first ones, so that what is known costs least: each further one adds a
        row."""
        if self._num_links == MAX_LINKS:
            return 0
        best, least = 0, self.seconds / self._worth
        drafted_s = worth = 0.0
        for count in range(1, min(len(chances), self._max_rows - self._num_rows) + 1):
            worth += chances[count - 1]
            drafted_s = self._drafted_s + self._small_s(count)
            each_s = (drafted_s + self._pass_s(self._num_rows + count)) / (self._worth + worth)
            if each_s < least:
                best, least = count, each_s
        if best:
            self._drafted_s += self._small_s(best)
            self._worth += sum(chances[:best])
            self._num_rows += best
            self._num_links += 1
        return best


def planned(round_: Round, chances: List[float], agreement: float, use: float) -> tuple[float, ...]:
    """Let chains grow behind places with these chances as long as it should pay, if the larger model says a
    link with the chance `agreement`, and what it says is right with the chance `use`. Returns how likely it
    is that followers of a place will be known, then followers of its likeliest follower, and so on."""
    whole, known = sum(chances), [1.0]
    links = sorted((chance * agreement * use for chance in chances), reverse=True)
    while count := round_.extend(links):
        links = links[:count]
        known.append(sum(links) / whole / use ** len(known))
        links = [link * agreement * use for link in links]
    return tuple(known)
