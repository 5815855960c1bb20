"""Experts that the processor computes where they lie keep their places in RAM meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from test_demand_tier import Reader, expert, gathered, tier_of

from penstock.memory.pages import PAGE
from penstock.memory.planning.experts.expert_lanes import ExpertRates
from penstock.weights.tiers.demand_tier import DemandTier
from penstock.weights.tiers.experts_in_ram import ExpertsInRam

#: Nothing pays for moving.
RATES = ExpertRates(PAGE, 1.0, 1e9, lambda tokens: 1e-6, lambda tokens: 1e-9, 0.0)


@pytest.fixture
def card() -> DemandTier:
    """With a slot for one expert, 0, that the next ones find taken."""
    card = tier_of(8, 1, 1, Reader())
    assert gathered(card, [0]) == [0]
    return card


def numbers(group: list[tuple[object, object]]) -> list[int | None]:
    return [key.expert for key, _ in group]  # type: ignore[attr-defined]


def test_who_computes_what(card: DemandTier) -> None:
    """The card what it has, and what would have to come from the disk; the processor the others, until they
    are used so often that they are to stay on the card."""
    host = tier_of(8, 3, 1, Reader())
    gathered(host, [0, 1, 2])
    in_ram = ExpertsInRam(card, host, RATES)
    asked = [expert(number) for number in (0, 1, 2, 5)]
    lent = in_ram.lend(asked, [1, 1, 1, 1])
    assert numbers(lent) == [1, 2] and all((at.buffer == key.expert).all() for key, at in lent)
    assert in_ram.num_lent == 2 and card.num_asked == card.num_hits + 1 == 3
    in_ram.give_back(lent)


def test_nothing_takes_the_place_of_an_expert_in_use(card: DemandTier) -> None:
    """Whoever needs a slot waits until the processor has computed."""
    host = tier_of(8, 2, 1, Reader())
    gathered(host, [1, 2])
    in_ram = ExpertsInRam(card, host, RATES)
    lent = in_ram.lend([expert(1), expert(2)], [1, 1])
    assert numbers(lent) == [1, 2]
    with ThreadPoolExecutor(1) as link:
        waiting = link.submit(gathered, host, [3])
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        assert all((arrival.buffer == key.expert).all() for key, arrival in lent)
        in_ram.give_back(lent)
        assert waiting.result(10) == [3]
