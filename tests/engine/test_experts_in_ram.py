"""Experts that the processor computes where they lie keep their places in RAM meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from test_demand_tier import Reader, expert, gathered, tier_of
from torch import Tensor

from penstock.errors import CorruptFile
from penstock.memory.pages import PAGE
from penstock.memory.planning.expert_lanes import ExpertRates
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
    assert numbers(lent.there) == [1, 2] and all((at.buffer == key.expert).all() for key, at in lent.there)
    assert in_ram.num_lent == 2 and card.num_asked == card.num_hits + 1 == 3
    assert not lent.coming and [key.expert for key in lent.others] == [0, 5]
    in_ram.give_back(lent.all)


def test_the_link_does_not_wait_for_the_disk_first(card: DemandTier) -> None:
    """What is to move from RAM to the card is asked for before what has to be read."""
    host = tier_of(8, 4, 1, Reader())
    gathered(host, [0, 1, 2])
    in_ram = ExpertsInRam(card, host, replace(RATES, processor_s=lambda tokens: 1e6))
    lent = in_ram.lend([expert(number) for number in (5, 2, 0, 1)], [1, 1, 1, 1])
    assert not lent.all and [key.expert for key in lent.others] == [2, 0, 1, 5]


#: What comes from the disk is computed in RAM, too.
WITH_DISK = replace(RATES, disk_bps=1e9)


def waiting_reader() -> Reader:
    reader = Reader()
    reader.may_read.clear()
    return reader


def test_experts_from_the_disk_stay_in_ram(card: DemandTier) -> None:
    """Each is read at once, lent when it is there, and keeps its place until the processor has computed. It
    counts as one that was not in RAM."""
    reader = Reader()
    host = tier_of(8, 5, 1, reader)
    gathered(host, [0, 1])
    num_asked, num_hits = host.num_asked, host.num_hits
    reader.may_read.clear()
    in_ram = ExpertsInRam(card, host, WITH_DISK)
    lent = in_ram.lend([expert(number) for number in (0, 1, 5, 6, 7)], [1, 1, 1, 2, 1])
    assert numbers(lent.there) == [1] and numbers(lent.coming) == [6, 5], "two slots are for those that pass"
    assert [key.expert for key in lent.others] == [0, 7] and reader.order[-2:] == [6, 5]
    assert (host.num_asked, host.num_hits) == (num_asked + 3, num_hits + 1) and in_ram.num_lent == 3
    arriving = in_ram.arriving(lent.coming)
    with ThreadPoolExecutor(1) as layer:
        first = layer.submit(next, arriving)
        with pytest.raises(TimeoutError):
            first.result(0.1)
        reader.may_read.set()
        groups = [first.result(10), *arriving]
    assert sorted(numbers([each for group in groups for each in group])) == [5, 6]  # type: ignore[type-var]
    gathered(host, [2])
    gathered(host, [3])
    assert all((at.buffer == key.expert).all() for key, at in lent.all)
    in_ram.give_back(lent.all)
    assert sorted(gathered(host, [2, 3, 4, 7])) == [2, 3, 4, 7]


def test_an_expert_that_cannot_be_read(card: DemandTier) -> None:
    """The layer learns of the error, and the next one who asks has the expert read anew."""
    reader = Reader()
    reader.failing.add(5)
    host = tier_of(8, 4, 1, reader)
    in_ram = ExpertsInRam(card, host, WITH_DISK)
    lent = in_ram.lend([expert(5)], [1])
    with pytest.raises(CorruptFile, match="expert 5"):
        list(in_ram.arriving(lent.coming))
    in_ram.give_back(lent.all)
    again = in_ram.lend([expert(5)], [1])
    assert not again.all and again.others == [expert(5)]
    reader.failing.clear()
    assert gathered(host, [5]) == [5] and sorted(gathered(host, [1, 2, 3, 4])) == [1, 2, 3, 4]


def test_an_engine_that_closes_waits_for_no_disk(card: DemandTier) -> None:
    reader = waiting_reader()
    host = tier_of(8, 4, 1, reader)
    in_ram = ExpertsInRam(card, host, WITH_DISK)
    lent = in_ram.lend([expert(5)], [1])
    with ThreadPoolExecutor(1) as layer:
        waiting = layer.submit(list, in_ram.arriving(lent.coming))
        host.arrivals.stop()
        with pytest.raises(RuntimeError, match="was closed"):
            waiting.result(10)
    reader.may_read.set()


def test_nothing_takes_the_place_of_an_expert_in_use(card: DemandTier) -> None:
    """Whoever needs a slot waits until the processor has computed. What comes from the disk takes no slot
    that the link needs then."""
    host = tier_of(8, 4, 1, Reader())
    gathered(host, [1, 2, 3, 4])
    in_ram = ExpertsInRam(card, host, WITH_DISK)
    lent = [each for pair in ((1, 2), (3, 4)) for each in in_ram.lend([*map(expert, pair)], [1, 1]).there]
    assert numbers(lent) == [1, 2, 3, 4]
    assert not in_ram.lend([expert(6), expert(7)], [1, 1]).all
    with ThreadPoolExecutor(1) as link:
        waiting = link.submit(gathered, host, [5])
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        assert all((arrival.buffer == key.expert).all() for key, arrival in lent)
        in_ram.give_back(lent)
        assert waiting.result(10) == [5]
    assert numbers(in_ram.lend([expert(6)], [1]).coming) == [6]


class Link:
    """Copies at once."""

    def copy(self, source: Tensor, target: Tensor, pieces: object) -> None:
        target.copy_(source)

    def wait_copied(self, buffer: Tensor) -> None: ...


@pytest.mark.parametrize("disk_bps", [0.0, 1e9])
@pytest.mark.parametrize("num_in_ram", range(1, 7))
def test_experts_from_the_disk_pass_through_ram(num_in_ram: int, disk_bps: float) -> None:
    """A layer gives its experts in RAM back after it has got all others. So RAM may not be full of them."""
    host = tier_of(8, num_in_ram, 1, Reader())
    card = tier_of(8, 1, 1, LinkReader(host, Link()))  # type: ignore[arg-type]
    gathered(card, [0])
    gathered(host, [*range(1, 1 + num_in_ram)])
    rates = replace(RATES, disk_bps=disk_bps)
    lent = ExpertsInRam(card, host, rates).lend([expert(number) for number in range(8)], [1] * 8)
    assert len(lent.all) == max(0, num_in_ram - 2)
    others, found = sorted({*range(8)} - {*numbers(lent.all)}), list[int]()  # type: ignore[type-var]
    layer = threading.Thread(target=lambda: found.extend(gathered(card, others)), daemon=True)  # type: ignore[arg-type]
    layer.start()
    layer.join(10)
    assert sorted(found) == others
    card.close()
