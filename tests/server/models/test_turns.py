"""Who makes room for whom."""

from __future__ import annotations

from penstock_server.models.turns import Held, allotment, leavers

OLD, NEW = Held("old", 40, last_used=1), Held("new", 50, last_used=2)


def test_nobody_goes_while_there_is_room() -> None:
    assert leavers(10, 100, [OLD, NEW]) == []


def test_the_longest_unused_goes_first_and_no_more_than_needed() -> None:
    assert leavers(50, 100, [NEW, OLD]) == ["old"]
    assert leavers(51, 100, [NEW, OLD]) == ["old", "new"]


def test_a_model_at_rest_goes_before_a_busy_one() -> None:
    busy = Held("old", 40, is_busy=True, last_used=1)
    assert leavers(60, 100, [busy, NEW]) == ["new"]


def test_pinned_models_stay_and_a_model_too_large_gets_the_rest() -> None:
    pinned = Held("old", 40, is_pinned=True, last_used=1)
    assert leavers(1000, 100, [pinned, NEW]) == ["new"]


def test_what_a_model_does_not_need_is_kept_for_others() -> None:
    assert allotment(10, 100, []) == 100
    assert allotment(10, 100, [30, 20]) == 50
    assert allotment(60, 100, [30, 20]) == 80, "the smaller one still fits beside it"
    assert allotment(500, 100, [30]) == 100, "it is streamed, and has use for all"
