"""Step times from experience, against machines that are what the model says."""

from __future__ import annotations

import pytest

from penstock.memory.cost import MeasuredSteps


def tokens_after(steps: MeasuredSteps, limit_s: float, floor_s: float, token_s: float, num_steps: int) -> int:
    """The step's size when one has taken as many tokens as were predicted to fit, so many times."""
    num_tokens = 8
    for _ in range(num_steps):
        steps.record(num_tokens, max(floor_s, num_tokens * token_s))
        allowed_s = max(limit_s, steps.predict_s(1))
        num_tokens = max(n for n in range(1, 1000) if n == 1 or steps.predict_s(n) <= allowed_s)
    return num_tokens


@pytest.mark.parametrize(
    ("limit_s", "floor_s", "best"),
    [
        (1.0, 0.2, 100),  # 100 tokens of 10 ms
        (0.0, 2.0, 200),  # as much as the floor hides
        (4.0, 2.0, 400),
    ],
)
def test_it_finds_how_many_tokens_fit(limit_s: float, floor_s: float, best: int) -> None:
    found = tokens_after(MeasuredSteps(), limit_s, floor_s, 0.01, 40)
    assert best * 0.8 <= found <= best * 1.5


def test_one_slow_step_is_forgotten() -> None:
    steps = MeasuredSteps()
    tokens_after(steps, 1.0, 0.2, 0.01, 20)
    steps.record(60, 9.0)
    assert steps.predict_s(100) > 2.0
    assert 80 <= tokens_after(steps, 1.0, 0.2, 0.01, 20) <= 150


def test_a_floor_that_rises_is_believed_in_the_end() -> None:
    steps = MeasuredSteps()
    tokens_after(steps, 0.0, 1.0, 0.01, 30)
    for _ in range(30):
        steps.record(8, 3.0)
    assert 2.5 < steps.predict_s(1) <= 3.0
    assert 240 <= tokens_after(steps, 0.0, 3.0, 0.01, 30) <= 450


def test_it_never_falls_with_more_tokens_and_knows_nothing_at_first() -> None:
    steps = MeasuredSteps()
    assert steps.predict_s(100) == 0.0
    steps.record(50, 1.0)
    times = [steps.predict_s(n) for n in range(1, 200)]
    assert times == sorted(times) and times[0] == 1.0
