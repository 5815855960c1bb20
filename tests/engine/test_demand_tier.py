"""Units that are asked for: each is what it should be, none is overwritten while it is lent, and what stays
is what expert_policy.py says."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.errors import CorruptFile
from penstock.memory.pages import PAGE
from penstock.memory.pools import MemoryPool
from penstock.spec import UnitKey
from penstock.weights.tiers.demand_tier import DemandTier
from penstock.weights.tiers.policies import met_last, next_in_cycle
from penstock.weights.tiers.use_counts import UseCounts


def expert(number: int) -> UnitKey:
    return UnitKey("decoder", 0, number)


class Reader:
    """Writes an expert's number, on a thread of its own, when it is allowed to."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.failing: set[int] = set()
        self.may_read = threading.Event()
        self.may_read.set()
        self._threads = ThreadPoolExecutor(2)

    def submit(self, key: UnitKey, buffer: Tensor) -> Future[int]:
        assert key.expert is not None
        self.order.append(key.expert)
        return self._threads.submit(self._read, key.expert, buffer)

    def _read(self, number: int, buffer: Tensor) -> int:
        self.may_read.wait()
        if number in self.failing:
            raise CorruptFile(f"expert {number}")
        buffer[:] = number
        return buffer.numel()

    def close(self) -> None:
        self._threads.shutdown()


def tier_of(num_experts: int, num_slots: int, num_per_sweep: int, reader: Reader) -> DemandTier:
    sizes = {expert(number): PAGE for number in range(num_experts)}
    pool = MemoryPool("experts", DemandTier.pool_bytes(sizes, num_slots))
    return DemandTier(sizes, reader, pool, num_slots, UseCounts(num_per_sweep))


def gathered(tier: DemandTier, numbers: list[int]) -> list[int]:
    found = []
    for group in tier.gather([expert(number) for number in numbers]):
        for key, arrival in group:
            assert key.expert is not None and (arrival.buffer == key.expert).all()
            found.append(key.expert)
    return found


@settings(deadline=None, max_examples=60)
@given(
    num_slots=st.integers(1, 6),
    num_per_sweep=st.integers(1, 8),
    demands=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=8), min_size=1, max_size=6),
    guesses=st.lists(st.lists(st.integers(0, 7), max_size=8), min_size=6, max_size=6),
)
def test_any_demand_gets_its_experts_once(
    num_slots: int, num_per_sweep: int, demands: list[list[int]], guesses: list[list[int]]
) -> None:
    reader = Reader()
    tier = tier_of(8, num_slots, num_per_sweep, reader)
    for demand, guess in zip(demands, guesses, strict=False):
        tier.expect([expert(number) for number in guess])
        assert sorted(gathered(tier, demand)) == sorted(set(demand))
    assert tier.num_asked == sum(len(set(demand)) for demand in demands)
    assert tier.num_asked - tier.num_hits <= len(reader.order)
    tier.close()


def test_what_is_there_comes_first_and_is_not_read_again() -> None:
    reader = Reader()
    tier = tier_of(8, 4, 4, reader)
    gathered(tier, [3, 5])
    reader.may_read.clear()
    found = tier.gather([expert(number) for number in (1, 5, 2, 3)])
    assert [key.expert for key, _ in next(found)] == [5, 3]
    reader.may_read.set()
    assert {key.expert for group in found for key, _ in group} == {1, 2}
    assert sorted(reader.order) == [1, 2, 3, 5] and tier.num_hits == 2
    tier.close()


def test_reads_are_under_way_while_a_group_is_computed() -> None:
    """All that is missing was asked for when the first group is lent, and nobody has to ask again."""
    reader = Reader()
    tier = tier_of(8, 6, 2, reader)
    gathered(tier, [0, 1])
    reader.may_read.clear()
    found = tier.gather([expert(number) for number in (2, 0, 3, 1, 4)])
    assert [key.expert for key, _ in next(found)] == [0, 1] and reader.order == [0, 1, 2, 3, 4]
    reader.may_read.set()
    assert {key.expert for group in found for key, _ in group} == {2, 3, 4}
    tier.close()


def test_more_than_there_are_slots_for() -> None:
    """What is lent keeps its place until the next group is asked for."""
    reader = Reader()
    tier = tier_of(8, 2, 8, reader)
    for group in tier.gather([expert(number) for number in range(8)]):
        time.sleep(0.001)  # the next reads go on meanwhile, into other slots
        assert all((arrival.buffer == key.expert).all() for key, arrival in group)
    assert len(reader.order) == 8
    tier.close()


def test_a_failed_read_is_told_and_tried_again() -> None:
    reader = Reader()
    reader.failing = {2}
    tier = tier_of(4, 2, 2, reader)
    with pytest.raises(CorruptFile, match="expert 2"):
        gathered(tier, [2])
    reader.failing = set()
    assert sorted(gathered(tier, [1, 2])) == [1, 2]
    tier.close()


def test_a_unit_that_arrived_for_nobody_gives_way() -> None:
    """An error ended the gathering that asked for expert 1: its slot must not be lost to all others."""
    reader = Reader()
    reader.failing = {0}
    tier = tier_of(8, 2, 2, reader)
    with pytest.raises(CorruptFile, match="expert 0"):
        gathered(tier, [0, 1])
    tier.arrivals.units[expert(1)].read.result()
    for _ in range(3):
        gathered(tier, [2, 3])
    assert sorted(reader.order) == [0, 1, 2, 3]
    tier.close()


def test_a_reader_that_refuses_is_told_of_and_asked_again() -> None:
    class Refusing(Reader):
        is_refusing = True

        def submit(self, key: UnitKey, buffer: Tensor) -> Future[int]:
            if self.is_refusing and key.expert == 1:
                raise RuntimeError("no more threads")
            return super().submit(key, buffer)

    reader = Refusing()
    tier = tier_of(4, 2, 2, reader)
    with pytest.raises(RuntimeError, match="no more threads"):
        gathered(tier, [0, 1])
    reader.is_refusing = False
    assert sorted(gathered(tier, [0, 1, 2])) == [0, 1, 2]
    tier.close()


def test_a_read_that_failed_before_anybody_waited_is_tried_once_more() -> None:
    """Reading experts 0 and 1 failed, and 0 was told. The disk is well again before somebody asks for 1."""
    reader = Reader()
    reader.failing = {0, 1}
    tier = tier_of(4, 4, 2, reader)
    with pytest.raises(CorruptFile, match="expert 0"):
        gathered(tier, [0, 1])
    assert isinstance(tier.arrivals.units[expert(1)].read.exception(), CorruptFile)
    reader.failing = set()
    assert gathered(tier, [1]) == [1]
    assert reader.order == [0, 1, 1]
    tier.close()


def test_a_failed_read_gives_its_slot_up_before_experts_that_are_pinned() -> None:
    """Two slots and a sweep of four: the most recently used expert gives way, and a failed one has no use."""
    reader = Reader()
    reader.failing = {0, 1}
    tier = tier_of(8, 2, 4, reader)
    with pytest.raises(CorruptFile):
        gathered(tier, [0, 1])
    tier.arrivals.units[expert(1)].read.exception()
    reader.failing = set()
    for number in (2, 3, 2, 3):
        gathered(tier, [number])
    assert reader.order == [0, 1, 2, 3], "expert 1 kept a slot that it does not fill"
    tier.close()


def test_what_a_user_who_is_gone_had_is_taken_back() -> None:
    """Two gatherings are suspended, as the traceback of an interrupted step keeps them; both are closed late,
    when the next user has the same experts."""
    reader = Reader()
    tier = tier_of(4, 2, 2, reader)
    gone = [tier.gather([expert(number)]) for number in (0, 1)]
    buffers = [next(each)[0][1].buffer for each in gone]
    assert {buffer.data_ptr() for buffer in tier.take_back()} == {buffer.data_ptr() for buffer in buffers}
    assert gathered(tier, [2]) == [2]
    present = tier.gather([expert(2)])
    ((_, arrival),) = next(present)
    for each in gone:
        each.close()
    assert gathered(tier, [0, 1, 3]) and (arrival.buffer == 2).all() and list(tier.slots.lent) == [expert(2)]
    tier.close()


def test_the_least_recently_used_gives_way_where_a_sweep_fits() -> None:
    reader = Reader()
    tier = tier_of(8, 3, 3, reader)
    for number in (0, 1, 2, 0, 3):
        gathered(tier, [number])
    gathered(tier, [0, 2, 3])  # 1 was used before all others, and is gone
    assert reader.order == [0, 1, 2, 3]
    tier.close()


def test_some_stay_where_a_sweep_does_not_fit() -> None:
    """A cycle of six through four slots: the least recently used would never be found again."""
    reader = Reader()
    tier = tier_of(6, 4, 6, reader)
    for _ in range(5):
        for number in range(6):
            gathered(tier, [number])
    assert tier.num_hits >= 4 * 3
    tier.close()


def test_closing_ends_who_waits() -> None:
    reader = Reader()
    reader.may_read.clear()
    tier = tier_of(4, 2, 2, reader)
    failures: list[BaseException] = []

    def gather() -> None:
        try:
            gathered(tier, [0])
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=gather)
    thread.start()
    while not reader.order:
        pass
    closing = threading.Thread(target=tier.close)
    closing.start()
    thread.join()
    assert "closed" in str(failures[0])
    reader.may_read.set()
    closing.join()


def test_policies_are_functions_of_numbers() -> None:
    cycle = "abcdef"
    assert next_in_cycle(cycle, 2, "c", "", True, True) == "d"
    assert next_in_cycle(cycle, 2, "c", "f", False, True) == "f"
    assert next_in_cycle(cycle, 2, "c", "f", False, False) is None
    assert next_in_cycle(cycle, 5, "fa", "", True, True) == "b"
    indexes = {key: index for index, key in enumerate(cycle)}
    assert met_last("adb", indexes, 2) == "b" and met_last("adb", indexes, 0) == "d"
    # "A" and "B" are an encoder's: a sweep passes them once, and goes round in the others.
    cycle = "ABcde"
    assert [next_in_cycle(cycle, 0, taken, "", True, True, 2) for taken in ("A", "AB", "ABc")] == list("Bcd")
    assert [next_in_cycle(cycle, 4, taken, "", True, True, 2) for taken in ("e", "ce", "cde")] == [
        "c",
        "d",
        None,
    ]
    assert next_in_cycle(cycle, 4, "cde", "B", True, True, 2) == "B", "a resident unit has its own place"
    assert next_in_cycle(cycle, 3, "cde", "A", True, False, 2) is None
    assert next_in_cycle(cycle, 1, "cdeB", "", True, True, 2) is None
    indexes = {key: index for index, key in enumerate(cycle)}
    assert met_last("cAd", indexes, 3, 2) == "A" and met_last("cd", indexes, 3, 2) == "c"
    assert met_last("cd", indexes, 0, 2) == "d"


def test_a_guess_is_read_when_nothing_else_is_and_counts_as_no_hit() -> None:
    reader = Reader()
    tier = tier_of(8, 4, 2, reader)
    gathered(tier, [0, 1])
    reader.may_read.clear()
    found = tier.gather([expert(0), expert(2)])
    assert [key.expert for key, _ in next(found)] == [0]
    tier.expect([expert(0), expert(5), expert(6)])
    assert reader.order == [0, 1, 2]  # what was asked for comes first
    reader.may_read.set()
    assert [key.expert for group in found for key, _ in group] == [2]
    tier.arrivals.units[expert(5)].read.result()
    num_hits = tier.num_hits
    assert sorted(gathered(tier, [0, 5, 7])) == [0, 5, 7]
    assert tier.num_hits - num_hits == 1 and reader.order.count(5) == 1
    assert (tier.expected.num_right, tier.expected.kept) == (1, frozenset())
    tier.close()
