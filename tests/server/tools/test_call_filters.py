"""Calls that are left out, and from where on an answer is over."""

from __future__ import annotations

import json

import pytest

from penstock_server.tools.call_filters import DistinctCalls
from penstock_server.tools.parsers import ListParser

from .folding import Found, parse


def listed(*calls: tuple[str, dict[str, object]]) -> str:
    return json.dumps([{"name": name, "parameters": arguments} for name, arguments in calls])


A, B, AB, OTHER = ("f", {"a": 1}), ("f", {"b": 1}), ("f", {"a": 1, "b": 1}), ("g", {"a": 1})


@pytest.mark.parametrize(
    ("calls", "num_told"),
    [
        ([A], 1),
        ([A, A], 1),
        ([A, B, AB, OTHER], 4),
        ([A, B, A, AB], 2),
        ([AB, A, AB], 2),
        ([("f", {}), ("g", {}), ("g", {})], 2),
    ],
)
def test_the_first_repetition_ends_the_list(
    calls: list[tuple[str, dict[str, object]]], num_told: int
) -> None:
    text, parser = listed(*calls), DistinctCalls(ListParser())
    found = parse(parser, list(text))
    assert [(name, json.loads(arguments)) for name, arguments in found.named] == calls[:num_told]
    assert parser.is_over == (num_told < len(calls))


def test_it_is_over_with_the_last_brace_of_the_repetition() -> None:
    parser, text = DistinctCalls(ListParser()), listed(A, A, B)
    end = text.index("}", text.index("}}") + 2) + 1
    parser.feed(text[: end - 1])
    assert not parser.is_over
    parser.feed(text[end - 1 : end])
    assert parser.is_over


def test_a_call_that_is_cut_off_is_told_as_far_as_it_came() -> None:
    parser, text = DistinctCalls(ListParser()), listed(A, A)
    found = Found().add(parser.feed(text[:-3]))
    assert len(found.calls) == 1
    assert found.add(parser.finish()).named == [("f", '{"a": 1}'), ("f", '{"a": 1')]
