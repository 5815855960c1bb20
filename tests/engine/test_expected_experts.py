"""Experts that are read before their layer asks: guesses by the next layer's router change time and nothing
else."""

from __future__ import annotations

from penstock.weights.tiers.expected_units import LEAST_SHARE, ExpectedUnits


def test_only_missing_units_are_read_and_wrong_guesses_end_it() -> None:
    expected = ExpectedUnits[str]()
    expected.expect(["a", "b", "c"], there={"a"})
    assert list(expected.to_read()) == ["b", "c"] and expected.kept == {"a", "b", "c"}
    expected.begin("b")
    assert list(expected.to_read()) == ["c"]
    assert expected.settle({"a", "b", "d"}) == {"b"}
    assert (expected.num_read, expected.num_right) == (1, 1)
    assert not expected.kept and not list(expected.to_read())
    while expected.pays:
        expected.expect(["x"], there=())
        assert list(expected.to_read()) == ["x"]
        assert expected.settle({"y"}) == set()
    expected.expect(["x"], there=())
    assert not list(expected.to_read())
    for _ in range(100):  # guesses are still counted, and are read again when they come true
        expected.expect(["x"], there=())
        expected.settle({"x"})
    assert expected.share_right > LEAST_SHARE and expected.pays
