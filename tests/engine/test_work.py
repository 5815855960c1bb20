"""The simulator of Work against one that counts seconds; and what the Work of a step says."""

from __future__ import annotations

import random

from penstock.memory.planning.work import Timeline, Work, simulate


def counted(works: list[Work]) -> dict[str, float]:
    """When each resource is done. Each second, a resource goes on with the first of its pieces that has not
    ended, if what this comes after has."""
    left = [work.seconds for work in works]
    ends: dict[str, float] = {}
    now = 0
    while any(left):
        now += 1
        has_ended = {id(work) for work, rest in zip(works, left, strict=True) if not rest}
        for resource in {work.resource for work in works}:
            own = (place for place, work in enumerate(works) if work.resource == resource and left[place])
            place = next(own, None)
            if place is not None and all(id(each) in has_ended for each in works[place].after):
                left[place] -= 1
                ends[resource] = now
    return ends


def test_it_ends_when_one_that_counts_seconds_does() -> None:
    dice = random.Random(3)
    for _ in range(200):
        works: list[Work] = []
        for _ in range(dice.randrange(1, 9)):
            rate = dice.choice((1, 2, 5))
            after = tuple(dice.sample(works, min(len(works), dice.randrange(3))))
            works.append(Work(dice.choice("abc"), rate * dice.randrange(1, 6), rate, after))
        assert simulate(works).ends == counted(works)


def test_resources_overlap_and_a_resource_does_one_piece_after_the_other() -> None:
    read, multiplied = Work("memory", 30, 10), Work("arithmetic", 8, 4)
    assert simulate([read, multiplied, Work("memory", 10, 10)]) == Timeline(
        {"memory": 4.0, "arithmetic": 2.0}, {"memory": 4.0, "arithmetic": 2.0}
    )


def test_a_piece_waits_for_those_before_it() -> None:
    read = Work("memory", 3)
    found = simulate([Work("disk", 5), read, Work("disk", 2, after=(read,)), Work("link", 1, after=(read,))])
    assert found.ends == {"disk": 7.0, "memory": 3.0, "link": 4.0} and found.seconds == 7.0
    assert found.busy["link"] == 1.0


def test_a_rate_that_is_not_known_takes_no_time() -> None:
    assert simulate([Work("disk", 10**9, 0.0)]).seconds == 0.0 == simulate([]).seconds
