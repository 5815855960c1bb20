"""circles.py: what the inner circle of tests leaves out."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

import circles
from circles import covering, read_durations, write_durations


def test_each_value_of_each_parameter_stays() -> None:
    cases = [dict(zip("abc", values, strict=True)) for values in product(range(5), "xyz", (True, False))]
    chosen = [cases[index] for index in covering(cases)]
    assert len(chosen) == 5
    for name in "abc":
        assert {case[name] for case in chosen} == {case[name] for case in cases}


def test_cases_of_one_parameter_all_stay() -> None:
    lists: list[dict[str, object]] = [{"a": []}, {"a": []}, {"a": {"b": 1}}]
    assert covering(lists) == [0, 1, 2] and covering([{}]) == [0]
    assert covering([{"a": value} for value in (0, False, 0.0, 1, True)]) == [0, 1, 2, 3, 4]


def test_a_tests_seconds_are_those_of_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circles, "DURATIONS", tmp_path / "durations.json")
    assert not read_durations().is_long("a.py::test_b")
    write_durations(
        [("a.py::test_a", "setup", 5.0), ("a.py::test_a", "call", 0.5), ("a.py::test_b", "call", 2.0)]
    )
    found = read_durations()
    assert found.files == {"a.py": 7.5}
    assert found.is_long("a.py::test_b") and not found.is_long("a.py::test_a")
