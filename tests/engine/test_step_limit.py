"""How many tokens a step may have, against trying every number."""

from __future__ import annotations

import pytest

from penstock.generation.scheduling.step_limit import MIN_CHUNK, StepLimit


@pytest.mark.parametrize("target_s", [0.001, 0.3, 1.0, 60.0])
@pytest.mark.parametrize("num_riders", [0, 1, 20, 200])
def test_the_limit_is_the_most_tokens_that_take_no_longer(target_s: float, num_riders: int) -> None:
    def predict_s(num_tokens: int) -> float:
        return max(0.25, num_tokens * 0.01)

    allowed_s = max(target_s, predict_s(max(1, num_riders)))
    fitting = max(number for number in range(257) if predict_s(number) <= allowed_s)
    found = StepLimit(256, target_s, predict_s).num_tokens(num_riders)
    assert found == max(fitting, min(256, num_riders + MIN_CHUNK))


def test_without_a_target_nothing_is_predicted() -> None:
    def never(num_tokens: int) -> float:
        raise AssertionError("asked for a prediction")

    assert StepLimit(256, 0.0, never).num_tokens(3) == 256
