"""One call, character by character."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_server.tools.reading import (
    ArgumentsPiece,
    CallBegin,
    CallReader,
    TextPiece,
    ValueReader,
    merge,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(value=VALUES, indent=st.sampled_from([None, 1]), rest=st.sampled_from([",", "}", "]", " x"]))
def test_any_json_value_ends_where_it_ends(value: object, indent: int | None, rest: str) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    assert ValueReader().feed(text + rest) == len(text)
    reader = ValueReader()
    assert [reader.feed(character) for character in text[:-1]] == [None] * (len(text) - 1)


def test_slips_within_arguments_cost_nothing() -> None:
    for text in ('{"a": "two\nlines"}', "{'a': 1,}", '{"a": [1 2]}', '{"a": \\x}'):
        assert ValueReader().feed(text + "}") == len(text)


def test_a_call_begins_with_its_arguments() -> None:
    reader = CallReader()
    assert reader.feed(' {"id": [1], "name": "f", "arguments":') == ([], "")
    assert not reader.has_begun
    assert reader.feed(' {"a"') == ([CallBegin("f"), ArgumentsPiece('{"a"')], "")
    assert reader.feed(': 1}, "more": 2') == ([ArgumentsPiece(": 1}")], "")
    assert reader.feed("} rest") == ([], " rest")
    assert reader.is_over and not reader.is_malformed


def test_arguments_in_front_of_the_name_wait_for_it() -> None:
    reader = CallReader()
    assert reader.feed('{"arguments": {"a": 1}, "name": "f"') == ([], "")
    assert reader.feed("}") == ([CallBegin("f"), ArgumentsPiece('{"a": 1}')], "")


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("x{", ""),
        ("{]", "{"),
        ('{"name"]', '{"name"'),
        ('{"name": ]', '{"name": '),
        ('{"name": 7,', '{"name": 7'),
        ('{"name": "other", "arguments": {', '{"name": "other", "arguments": '),
        ('{"arguments": {}}', '{"arguments": {}'),
        ("{}", "{"),
    ],
)
def test_what_is_malformed_is_given_back(text: str, read: str) -> None:
    reader = CallReader(known_names={"f"})
    events, rest = reader.feed(text)
    assert reader.is_over and reader.is_malformed and events == []
    assert (reader.text, reader.text + rest) == (read, text)


def test_after_a_begun_call_a_slip_ends_it() -> None:
    reader = CallReader()
    events, rest = reader.feed('{"name": "f", "arguments": {} oops}')
    assert events == [CallBegin("f"), ArgumentsPiece("{}")] and rest == "oops}"
    assert reader.is_over and reader.has_begun


def test_neighbours_become_one() -> None:
    events = [TextPiece("a"), TextPiece(""), TextPiece("b"), CallBegin("f"), ArgumentsPiece("")]
    assert merge([*events, ArgumentsPiece("{"), ArgumentsPiece("}")]) == [
        TextPiece("ab"),
        CallBegin("f"),
        ArgumentsPiece("{}"),
    ]
