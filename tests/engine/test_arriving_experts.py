"""Experts that are lent while they are read: each is what it should be once its read was waited for, whatever
was guessed, taken back or given up before."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.errors import CorruptFile
from penstock.memory import direct_io
from penstock.memory.direct_io import DirectReader
from penstock.memory.pages import PAGE
from penstock.memory.pools import MemoryPool
from penstock.memory.reads.ordered_reads import OrderedRead, OrderedReads
from penstock.spec import UnitKey
from penstock.weights.tiers.demand_tier import DemandTier
from penstock.weights.tiers.use_counts import UseCounts

NUM_EXPERTS, EXPERT_BYTES = 8, 6 * PAGE


def expert(number: int) -> UnitKey:
    return UnitKey("decoder", 0, number)


class FileReader:
    """Reads experts, filled with their numbers, from a file."""

    def __init__(self, file: Path) -> None:
        self.file, self.direct, self.order_of = file, DirectReader(), list[int]()
        self.direct.__dict__["_ordered"] = OrderedReads(PAGE, 1)

    def submit(self, key: UnitKey, buffer: Tensor) -> Future[int]:
        raise AssertionError("an ordered read serves")

    def can_order(self, keys: Iterable[UnitKey]) -> bool:
        return self.direct.can_order([self.file])

    def submit_ordered(self, key: UnitKey, buffer: Tensor) -> OrderedRead:
        assert key.expert is not None
        self.order_of.append(key.expert)
        return self.direct.order(self.file, key.expert * EXPERT_BYTES, EXPERT_BYTES, buffer)

    def close(self) -> None:
        self.direct.close()


@pytest.fixture
def file(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    try:
        OrderedReads().close()
    except OSError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(direct_io, "is_queued", lambda descriptor: True)
    path = tmp_path_factory.mktemp("experts") / "experts"
    path.write_bytes(b"".join(bytes([number]) * EXPERT_BYTES for number in range(NUM_EXPERTS)))
    return path


def tier_of(reader: FileReader, num_slots: int, num_per_sweep: int = 2) -> DemandTier:
    sizes = {expert(number): EXPERT_BYTES for number in range(NUM_EXPERTS)}
    pool = MemoryPool("experts", DemandTier.pool_bytes(sizes, num_slots))
    return DemandTier(sizes, reader, pool, num_slots, UseCounts(num_per_sweep), is_alone=True)


def gathered(tier: DemandTier, numbers: list[int]) -> list[int]:
    found = []
    for group, arriving in tier.gather_arriving([expert(number) for number in numbers]):
        num_there = len(group) - (len(arriving) if arriving is not None else 0)
        for index, (key, arrival) in enumerate(group):
            if arriving is not None and index >= num_there:
                arriving.settle(index - num_there)
            assert key.expert is not None and (arrival.buffer == key.expert).all()
            found.append(key.expert)
    return found


def test_any_demand_gets_its_experts_once(file: Path) -> None:
    @settings(deadline=None, max_examples=100)
    @given(
        num_slots=st.integers(1, 6),
        demands=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=8), min_size=1, max_size=6),
        guesses=st.lists(st.lists(st.integers(0, 7), max_size=8), min_size=6, max_size=6),
        is_arriving=st.lists(st.booleans(), min_size=6, max_size=6),
    )
    def check(
        num_slots: int, demands: list[list[int]], guesses: list[list[int]], is_arriving: list[bool]
    ) -> None:
        tier = tier_of(FileReader(file), num_slots)
        for demand, guess, arriving in zip(demands, guesses, is_arriving, strict=False):
            tier.expect([expert(number) for number in guess])
            if arriving:
                assert sorted(gathered(tier, demand)) == sorted(set(demand))
                continue
            found = [each for group in tier.gather([expert(number) for number in demand]) for each in group]
            assert sorted(key.expert or 0 for key, _ in found) == sorted(set(demand))
        assert tier.num_asked == sum(len(set(demand)) for demand in demands)
        tier.close()

    check()


def test_what_is_coming_is_lent_behind_what_is_there(file: Path) -> None:
    reader = FileReader(file)
    tier = tier_of(reader, 4)
    gathered(tier, [3])
    ((group, arriving),) = tier.gather_arriving([expert(number) for number in (1, 3, 2)])
    assert [key.expert for key, _ in group] == [3, 1, 2] and arriving is not None and len(arriving) == 2
    assert reader.order_of == [3, 1, 2] and (tier.num_asked, tier.num_hits) == (4, 1)
    tier.close()


def test_what_is_there_is_taken_at_once_and_stays(file: Path) -> None:
    """Guesses take no slot of it, and it counts as what is gathered does."""
    reader = FileReader(file)
    tier = tier_of(reader, 4, num_per_sweep=1)
    gathered(tier, [0, 1])
    gathered(tier, [2])
    assert tier.take_present([expert(1), expert(3)]) is None and (tier.num_asked, tier.num_hits) == (3, 0)
    found = tier.take_present([expert(1), expert(0)])
    assert found is not None and [int(arrival.buffer[0]) for arrival in found] == [1, 0]
    assert (tier.num_asked, tier.num_hits) == (5, 2)
    tier.expect([expert(number) for number in (3, 4, 5)])
    assert reader.order_of == [0, 1, 2, 3, 4], "a slot was free, and nobody used expert 2"
    assert sorted(gathered(tier, [5, 3])) == [3, 5] and (tier.num_asked, tier.num_hits) == (7, 2)
    tier.close()


def test_nothing_leaves_while_somebody_computes_with_all_that_is_there(file: Path) -> None:
    """Guesses wait until the run ends, and what its last layer asked for stays then. Reads that began before
    the run go on, and whoever runs is told of them."""
    reader = FileReader(file)
    tier = tier_of(reader, 4, num_per_sweep=1)
    gathered(tier, [0, 1])
    gathered(tier, [3])
    tier.expect([expert(2)])
    ((key, arrival),) = tier.begin_run()
    assert key == expert(2)
    tier.expect([expert(4), expert(5)])
    assert reader.order_of == [0, 1, 3, 2] and set(tier.arrivals.units) == {
        expert(number) for number in range(4)
    }
    while not arrival.has_ended:
        time.sleep(0.001)
    tier.expect([expert(2)])
    tier.end_run([[expert(2)], [expert(1), expert(0)]])
    assert (tier.num_asked, tier.uses.num_uses) == (6, 6)
    tier.expect([expert(4), expert(5), expert(6)])
    assert reader.order_of == [0, 1, 3, 2, 4, 5], "the slots of experts 3 and 2, and no others"
    assert sorted(gathered(tier, [5, 4])) == [4, 5]
    tier.close()


def test_a_run_uses_what_it_asks_for_and_ends_with_its_sweep(file: Path) -> None:
    """The least recently used expert goes. A sweep that was given up leaves no run behind, and a closed tier
    begins none."""
    reader = FileReader(file)
    tier = tier_of(reader, 4, num_per_sweep=1)
    for number in range(4):
        gathered(tier, [number])
    tier.begin_run()
    tier.end_run([[expert(0)], [expert(2)]])
    gathered(tier, [5])
    assert set(tier.arrivals.units) == {expert(number) for number in (0, 2, 3, 5)}
    tier.begin_run()
    tier.take_back()
    assert gathered(tier, [6]) == [6]
    tier.close()
    with pytest.raises(RuntimeError, match="closed"):
        tier.begin_run()


def test_wrong_guesses_give_their_slots_back(file: Path) -> None:
    """Three guesses wait behind one another; the layer asks for others, and none of its slots is lost."""
    reader = FileReader(file)
    tier = tier_of(reader, 4)
    for _ in range(20):
        tier.expect([expert(number) for number in (0, 1, 2)])
        assert sorted(gathered(tier, [4, 5, 6, 7])) == [4, 5, 6, 7]
    arrivals = tier.arrivals
    while arrivals.clock.num_reads:
        with arrivals:
            arrivals.wait()
    assert len(arrivals.free_slots) + len(arrivals.units) == 4
    tier.close()


def test_a_failed_read_is_told_and_tried_again(file: Path) -> None:
    content = file.read_bytes()
    reader = FileReader(file)
    file.write_bytes(content[: 5 * EXPERT_BYTES])
    tier = tier_of(reader, 4)
    with pytest.raises(CorruptFile, match="ends at"):
        gathered(tier, [1, 7])
    for _ in range(2):
        assert sorted(gathered(tier, [1, 2, 3, 4])) == [1, 2, 3, 4], "expert 7 keeps no slot"
    with pytest.raises(CorruptFile, match="ends at"):
        gathered(tier, [7])
    tier.close()
