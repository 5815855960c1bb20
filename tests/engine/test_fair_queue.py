"""Who comes in next."""

from __future__ import annotations

import pytest

from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.scheduling import token_counters
from penstock.generation.scheduling.fair_queue import FairQueue
from penstock.generation.sequence import Sequence


def sequence(sequence_id: int, client: str = "", priority: int = 0) -> Sequence:
    request = GenerationRequest([5], SamplingParams(), client=client, priority=priority)
    return Sequence(sequence_id, request, 10)


def taken(queue: FairQueue, num_tokens: int = 10) -> list[int]:
    """All in their order; each is charged as many tokens."""
    order = []
    while (first := queue.first) is not None:
        queue.remove(first)
        queue.charge(first.request.client, num_tokens)
        order.append(first.sequence_id)
    return order


def test_age_decides_among_one_clients() -> None:
    queue = FairQueue()
    for number in range(5):
        queue.add(sequence(number))
    assert len(queue) == 5 and taken(queue) == [0, 1, 2, 3, 4] and not queue


def test_clients_take_turns_and_priorities_come_before() -> None:
    queue = FairQueue()
    for number in range(4):
        queue.add(sequence(number, "a"))
    for number in range(4, 7):
        queue.add(sequence(number, "b", priority=-1 if number == 6 else 0))
    assert taken(queue) == [6, 0, 1, 4, 2, 5, 3]


def test_who_was_in_before_comes_first_within_its_priority() -> None:
    queue = FairQueue()
    for number, priority in enumerate((1, 1, 0)):
        queue.add(sequence(number, "a", priority))
    back = sequence(3, "a", 1)
    back.restart()
    queue.put_back(back)
    assert taken(queue) == [2, 3, 0, 1]


def test_a_client_can_not_save_up_what_it_did_not_use() -> None:
    queue = FairQueue()
    queue.add(sequence(0, "quiet"))
    for number in range(1, 21):
        queue.add(sequence(number, "busy"))
    for _ in range(12):
        first = queue.first
        assert first is not None
        queue.remove(first)
        queue.charge(first.request.client, 10)
    for number in range(21, 25):
        queue.add(sequence(number, "quiet"))
    assert taken(queue)[:6] == [12, 21, 13, 22, 14, 23]


def test_counters_are_not_kept_for_ever_and_debts_are_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_counters, "MAX_COUNTERS", 10)
    queue = FairQueue()
    queue.charge("greedy", 10**6)
    for number in range(200):
        queue.add(sequence(number, f"client {number}"))
        taken(queue)
    assert len(queue._counters._served) <= 12
    queue.add(sequence(300, "somebody"))
    queue.add(sequence(301, "greedy"))
    queue.add(sequence(302, "somebody"))
    assert taken(queue) == [300, 302, 301]
