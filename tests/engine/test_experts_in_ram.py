"""Experts that the processor computes where they lie keep their places in RAM meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_demand_tier import Reader, expert, gathered, tier_of
from torch import Tensor

from penstock.memory.pages import PAGE
from penstock.memory.planning.experts.expert_lanes import ExpertRates
from penstock.weights.tiers.demand_tier import DemandTier
from penstock.weights.tiers.experts_in_ram import ExpertsInRam
from penstock.weights.tiers.readers import LinkReader

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
    host = tier_of(8, 4, 1, Reader())
    gathered(host, [0, 1, 2])
    in_ram = ExpertsInRam(card, host, RATES)
    asked = [expert(number) for number in (0, 1, 2, 5)]
    lent = in_ram.lend(asked, [1, 1, 1, 1])
    assert numbers(lent) == [1, 2] and all((at.buffer == key.expert).all() for key, at in lent)
    assert in_ram.num_lent == 2 and card.num_asked == card.num_hits + 1 == 3
    in_ram.give_back(lent)


def test_nothing_takes_the_place_of_an_expert_in_use(card: DemandTier) -> None:
    """Whoever needs a slot waits until the processor has computed."""
    host = tier_of(8, 4, 1, Reader())
    gathered(host, [1, 2, 3, 4])
    in_ram = ExpertsInRam(card, host, RATES)
    lent = [each for pair in ((1, 2), (3, 4)) for each in in_ram.lend([*map(expert, pair)], [1, 1])]
    assert numbers(lent) == [1, 2, 3, 4]
    with ThreadPoolExecutor(1) as link:
        waiting = link.submit(gathered, host, [5])
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        assert all((arrival.buffer == key.expert).all() for key, arrival in lent)
        in_ram.give_back(lent)
        assert waiting.result(10) == [5]


class Link:
    """Copies at once."""

    def copy(self, source: Tensor, target: Tensor, pieces: object) -> None:
        target.copy_(source)

    def wait_copied(self, buffer: Tensor) -> None: ...


@pytest.mark.parametrize("num_in_ram", range(1, 7))
def test_experts_from_the_disk_pass_through_ram(num_in_ram: int) -> None:
    """A layer gives its experts in RAM back after it has got all others. So RAM may not be full of them."""
    host = tier_of(8, num_in_ram, 1, Reader())
    card = tier_of(8, 1, 1, LinkReader(host, Link()))  # type: ignore[arg-type]
    gathered(card, [0])
    gathered(host, [*range(1, 1 + num_in_ram)])
    lent = ExpertsInRam(card, host, RATES).lend([expert(number) for number in range(8)], [1] * 8)
    assert len(lent) == max(0, num_in_ram - 2)
    others, found = sorted({*range(8)} - {*numbers(lent)}), list[int]()  # type: ignore[type-var]
    layer = threading.Thread(target=lambda: found.extend(gathered(card, others)), daemon=True)  # type: ignore[arg-type]
    layer.start()
    layer.join(10)
    assert sorted(found) == others
    card.close()
