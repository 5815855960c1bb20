"""circles.py: what the inner circle of tests leaves out."""

from __future__ import annotations

from itertools import product

from circles import covering


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
