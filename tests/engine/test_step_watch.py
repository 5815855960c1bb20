"""What a probe is told of steps that fail, hang, or take long."""

from __future__ import annotations

import math

import pytest

from penstock.step_watch import FAILING_S, LEAST_S, SLOWEST, UNKNOWN_S, StepWatch

NEVER = -math.inf


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def kind(watch: StepWatch, moved_s: float = NEVER, layer_s: float = 1.0) -> str | None:
    found = watch.trouble(moved_s, layer_s)
    return None if found is None else found.kind


def test_an_error_counts_until_a_step_is_computed() -> None:
    watch = StepWatch(Clock())
    assert kind(watch) is None
    for _ in range(2):
        watch.begin()
        watch.fail()
        assert kind(watch) == "failing"
        watch.begin()
        watch.end(is_computed=False)
        assert kind(watch) == "failing", "nothing was computed"
    watch.begin()
    watch.end(is_computed=True)
    assert kind(watch) is None


def test_an_error_after_which_nobody_came() -> None:
    clock = Clock()
    watch = StepWatch(clock)
    watch.begin()
    watch.fail()
    clock.now_s += FAILING_S
    assert kind(watch) is None


@pytest.mark.parametrize(
    ("layer_s", "limit_s"), [(0.0, UNKNOWN_S), (0.1, LEAST_S), (LEAST_S, SLOWEST * LEAST_S)]
)
def test_a_layer_that_hangs(layer_s: float, limit_s: float) -> None:
    clock = Clock()
    watch = StepWatch(clock)
    watch.begin()
    clock.now_s += limit_s - 1
    assert kind(watch, layer_s=layer_s) is None
    moved_s = clock.now_s
    clock.now_s += limit_s - 1
    assert kind(watch, moved_s, layer_s) is None, "another layer has begun since"
    clock.now_s += 1
    assert kind(watch, moved_s, layer_s) == "stuck"
    watch.end(is_computed=False)
    assert kind(watch, moved_s, layer_s) is None, "no step hangs where none is computed"
