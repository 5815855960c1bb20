"""How long chains grow before a larger model judges them, against the best length of all."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from penstock.generation.drafting.rounds import MAX_LINKS, Round, planned


def flat_s(num_rows: int) -> float:
    """A pass that waits for memory."""
    return 1.0


def bent_s(num_rows: int) -> float:
    """A pass that waits for memory up to five rows, and for its arithmetic from there on."""
    return max(1.0, 0.2 * num_rows)


@pytest.mark.parametrize("pass_s", [flat_s, bent_s])
@pytest.mark.parametrize("small_s", [0.0, 0.05, 0.3, 2.0])
@pytest.mark.parametrize("rate", [0.3, 0.7, 0.95])
def test_a_chain_is_as_long_as_costs_least_for_each_level(
    pass_s: Callable[[int], float], small_s: float, rate: float
) -> None:
    def cost(num_links: int) -> float:
        worth = sum(rate**level for level in range(num_links + 1))
        return (num_links * small_s + pass_s(1 + num_links)) / worth

    best = min(range(MAX_LINKS + 1), key=cost)
    round_ = Round(lambda num_places: small_s, pass_s, [1.0], 100)
    known = planned(round_, [1.0], rate, 1.0)
    assert cost(len(known) - 1) == pytest.approx(cost(best))
    assert known == pytest.approx([rate**level for level in range(len(known))])
    assert round_.seconds == pytest.approx((len(known) - 1) * small_s + pass_s(len(known)))


def test_the_likeliest_chains_grow_first() -> None:
    round_ = Round(lambda num_places: 0.01, bent_s, [1.0, 0.5, 0.05], 100)
    counts = list(itertools.takewhile(bool, (round_.extend([0.9**n, 0.4**n, 0.01]) for n in range(1, 30))))
    assert counts[0] == 2 and counts == sorted(counts, reverse=True)


def test_rows_have_an_end() -> None:
    round_ = Round(lambda num_places: 0.0, flat_s, [1.0, 1.0], 5)
    assert [round_.extend([1.0, 1.0]) for _ in range(3)] == [2, 1, 0]


def test_what_is_known_is_not_what_is_of_use() -> None:
    """A link that the larger model says may be wrong all the same."""
    half = planned(Round(lambda _: 0.01, flat_s, [1.0], 100), [1.0], 0.9, 0.5)
    assert 1 < len(half) < len(planned(Round(lambda _: 0.01, flat_s, [1.0], 100), [1.0], 0.9, 1.0))
    assert half == pytest.approx([0.9**level for level in range(len(half))])
