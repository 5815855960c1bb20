"""What schemas say of their values, keyword by keyword."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.generation.grammars.schema_facts import Facts, Names, moved, own_names

X, Y = {"properties": {"k": {"const": "x"}}}, {"properties": {"k": {"const": "y"}}}


@pytest.mark.parametrize(
    ("one", "other", "is_apart"),
    [
        ([{"type": "null"}], [{"type": "object"}], True),
        ([{"type": ["null", "object"]}], [{"type": "object"}], False),
        ([{"type": "integer"}], [{"type": "number"}], False),
        ([{"type": "string"}], [{"enum": ["a"]}], False),
        ([{"enum": ["a", "b"]}, {"enum": ["b", "c"]}], [{"const": "a"}], True),
        # 1 and 1.0 are one value.
        ([{"const": 1}], [{"const": 1.0}], False),
        ([{"const": 1}], [{"const": True}], True),
        ([X | {"required": ["k"]}], [Y], True),
        ([X], [Y], False),
        ([X | {"required": ["k"]}], [{}], False),
        ([True], [{"type": 3}], False),
    ],
)  # fmt: skip
def test_what_no_value_is_both_of(one: list[Any], other: list[Any], is_apart: bool) -> None:
    mine, theirs = (Facts.of([part for part in side if isinstance(part, dict)]) for side in (one, other))
    assert mine.excludes(theirs) == theirs.excludes(mine) == is_apart


def test_names() -> None:
    schema = {"required": ["c", "a"], "properties": {"b": {}, "a": True}, "patternProperties": {"^x": {}}}
    assert own_names(schema) == Names(("b", "a", "c"), frozenset("ab"), ("^x",), is_naming=True)
    assert own_names({"type": "object"}) == Names()
    assert own_names({"unevaluatedProperties": False}).is_open


def test_references_move_and_data_does_not() -> None:
    reference = {"$ref": "#/$defs/a"}
    schema = {"items": [reference], "properties": {"const": reference, "$ref": {}}, "const": reference}
    there = {"$ref": "#/b/$defs/a"}
    assert moved(schema, "#/b") == {
        "items": [there],
        "properties": {"const": there, "$ref": {}},
        "const": reference,
    }
    assert moved({"$ref": "https://example.org/x"}, "#/b") == {"$ref": "https://example.org/x"}
