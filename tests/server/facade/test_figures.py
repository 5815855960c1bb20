"""Figures as people read them."""

from __future__ import annotations

import math

import pytest

from penstock_server.facade.figures import duration, rate


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0.00 ms"), (0.00115, "1.15 ms"), (0.0934, "93.4 ms"), (0.99949, "999 ms"), (0.9996, "1.00 s"),
        (9.996, "10.0 s"), (23.3379, "23.3 s"), (119.96, "120 s"), (744.0, "12.4 min"), (11160.0, "3.1 h"),
    ],
)  # fmt: skip
def test_a_duration_has_three_digits_and_a_unit(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("per_second", "shown"),
    [(0.623, "0.62"), (9.996, "10.0"), (57.93, "57.9"), (41475.77, "41,476"), (math.inf, "inf")],
)
def test_a_rate_has_three_digits_at_least(per_second: float, shown: str) -> None:
    assert rate(per_second) == shown
