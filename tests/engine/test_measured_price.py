"""What questions to a drafter take, as measured: prices follow, and what was dear is tried again later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from test_two_levels import other, two_levels

from penstock.generation.drafting.measured_price import MeasuredPrice
from penstock.generation.drafting.rounds import Round, planned
from penstock.generation.requests.generation_request import SamplingParams

__all__ = ["other"]  # a fixture


def predicted_s(num_places: int) -> float:
    return 0.1 + 0.01 * num_places


def test_a_price_is_predicted_until_something_was_measured() -> None:
    price = MeasuredPrice(predicted_s)
    assert [price.seconds(count) for count in (1, 5, 40)] == [predicted_s(count) for count in (1, 5, 40)]
    unknown = MeasuredPrice(lambda num_places: 0.0)
    unknown.record(1, 3.0)
    assert unknown.seconds(1) == 0.0, "where nothing is known, no guess has a price"


def test_a_price_is_that_of_the_last_questions_of_the_size() -> None:
    price = MeasuredPrice(predicted_s)
    for _ in range(5):
        price.record(6, 3 * predicted_s(6))
        price.record(1, 0.5 * predicted_s(1))
    price.record(6, 100.0)  # by accident
    for count, ratio in ((1, 0.5), (4, 3.0), (7, 3.0), (50, 3.0), (2, 0.5)):
        assert price.seconds(count) == pytest.approx(ratio * predicted_s(count)), count
    for _ in range(5):
        price.record(5, predicted_s(5))
    assert price.seconds(6) == pytest.approx(predicted_s(6))


def test_one_question_does_not_say_all() -> None:
    price = MeasuredPrice(predicted_s)
    price.record(1, 9 * predicted_s(1))
    assert predicted_s(1) < price.seconds(1) < 9 * predicted_s(1)


def test_what_was_dear_is_tried_again_later() -> None:
    """Size by size, and one question that is still dear brings the price back."""
    price = MeasuredPrice(predicted_s)
    for _ in range(5):
        price.record(6, 5 * predicted_s(6))
        price.record(1, 2 * predicted_s(1))
    for _ in range(300):
        price.record(1, 2 * predicted_s(1))
        price.end_step()
    assert price.seconds(6) < 1.3 * predicted_s(6)
    assert price.seconds(1) == pytest.approx(2 * predicted_s(1))
    price.record(6, 5 * predicted_s(6))
    assert price.seconds(6) == pytest.approx(5 * predicted_s(6))


@pytest.mark.parametrize(("row_s", "longer"), [(0.0, 1), (0.04, 0), (0.16, -1)])
def test_chains_are_as_long_as_pays_by_what_passes_took(row_s: float, longer: int) -> None:
    """Longer where further rows are cheaper than predicted, shorter where they are dearer."""

    def pass_s(num_rows: int) -> float:
        return 0.1 + 0.04 * num_rows

    def num_links(seconds: Callable[[int], float]) -> int:
        return len(planned(Round(lambda num_places: 0.02, seconds, [1.0], 100), [1.0], 0.8, 1.0))

    price = MeasuredPrice(pass_s)
    for num_rows in range(1, 20):
        for _ in range(5):
            price.record(num_rows, 0.14 + row_s * (num_rows - 1))
    measured, predicted = num_links(price.seconds), num_links(pass_s)
    assert (measured > predicted) - (measured < predicted) == longer


def test_drafters_measure_their_questions(tiny_llama: Path, other: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with two_levels(tiny_llama, other) as (engine, found):
        for each in (found.small, found.planes):
            each._measured = MeasuredPrice(lambda num_places: 1000.0)
        engine.generate([[5, 9, 20]], params)
        for each in (found.small, found.planes):
            assert 0 < each._measured.seconds(1) < 500 and each.spent_s > 0
        assert found.spent_s == found.small.spent_s + found.planes.spent_s
