"""Closed schemas: what a walk through the grammar makes is valid by the jsonschema package and has no
property that the schema does not name."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from random_schemas import NAMES, random_open_schema

from penstock.errors import InvalidParameter
from penstock.generation.grammars.closed_schema import closed
from penstock.generation.grammars.grammar import Grammar
from penstock.generation.grammars.grammar_trial import source

I = {"type": "integer", "minimum": 0, "maximum": 9}  # noqa: E741


class Bytes:
    """A vocabulary of single bytes."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = tuple(bytes([byte]) for byte in range(256)) + (b"<end>",)

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


BYTES = LLTokenizer(Bytes())  # type: ignore[arg-type]


def matcher(schema: dict[str, Any], *, is_closed: bool = True) -> LLMatcher:
    grammar = Grammar.json_schema(schema, is_closed=is_closed)
    return LLMatcher(BYTES, source(grammar.kind, grammar.text), log_level=0)


def admits(schema: dict[str, Any], value: object) -> bool:
    follower = matcher(schema)
    assert not follower.get_error(), follower.get_error()
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    return follower.try_consume_tokens(list(text)) == len(text) and follower.is_accepting()


def walk(schema: dict[str, Any], dice: random.Random, max_bytes: int = 300) -> Any:
    """What a model that knows nothing writes; None if it comes to no end."""
    follower, said = matcher(schema), bytearray()
    while not follower.get_error() and len(said) < max_bytes:
        if follower.is_stopped():
            return json.loads(said)
        mask = int.from_bytes(follower.compute_bitmask(), "little")
        allowed = [byte for byte in range(257) if mask >> byte & 1]
        ends = [byte for byte in allowed if byte == 256 or byte in b'"}]']
        byte = dice.choice(ends if ends and dice.random() < 0.3 else allowed)
        follower.consume_token(byte)
        if byte < 256:
            said.append(byte)
    return None


@pytest.mark.slow
def test_walks_are_valid_and_invent_nothing() -> None:
    dice = random.Random(5)
    known = {*NAMES, "kind", *(f"x{digit}" for digit in range(10))}
    num_whole = num_refused = 0
    for _ in range(120):
        schema = random_open_schema(dice)
        if matcher(schema).get_error():
            # Nothing is of it, or it is beyond llguidance: so it is without closing, too.
            assert matcher(schema, is_closed=False).get_error()
            num_refused += 1
            continue
        validator = jsonschema.Draft202012Validator(schema)
        for value in [walk(schema, dice) for _ in range(4)]:
            if value is not None:
                validator.validate(value)
                assert set(value) <= known
                num_whole += 1
    assert num_whole > 150 and num_refused < 80


A, B = {"properties": {"a": I}}, {"properties": {"b": I}}
HAS_A, HAS_B = A | {"required": ["a"]}, B | {"required": ["b"]}
DEFINED = {"$defs": {"A": A}}
REFERENCE = {"$ref": "#/$defs/A"}


@pytest.mark.parametrize(
    ("schema", "admitted", "refused"),
    [
        (A, [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
        ({"properties": {}}, [{}], [{"a": 1}]),
        ({"properties": {"a": A}}, [{"a": {"a": 1}}], [{"a": {"b": 1}}]),
        ({"items": A}, [[{"a": 1}]], [[{"b": 1}]]),
        ({"prefixItems": [A]}, [[{"a": 1}]], [[{"b": 1}]]),
        ({"anyOf": [{"type": "null"}, A]}, [None, {"a": 1}], [{"b": 1}]),
        # A name that is asked for is one.
        (A | {"required": ["x"]}, [{"x": []}], [{"x": 1, "b": 1}]),
        # Whoever names no property leaves them all; whoever says something of others is heard.
        ({"type": "object"}, [{"b": {"c": 1}}], []),
        ({"allOf": [{"type": "object"}]}, [{"b": 1}], []),
        (A | {"additionalProperties": True}, [{"b": 1}], [{"a": "x"}]),
        (A | {"additionalProperties": B}, [{"x": {"b": 1}}], [{"x": {"a": 1}}]),
        ({"allOf": [A, {"additionalProperties": True}]}, [{"b": 1}], [{"a": "x"}]),
        ({"anyOf": [A | {"additionalProperties": True}, {"type": "null"}]}, [{"b": 1}, None], []),
        (HAS_A | {"minProperties": 2, "type": "object"}, [{"a": 1, "b": 1}], [{"a": 1}]),
        ({"patternProperties": {"^x": A}}, [{"x1": {"a": 1}}], [{"b": 1}, {"x1": {"b": 1}}]),
        (A | {"patternProperties": {"^x": {}}}, [{"a": 1, "x1": 2}], [{"b": 1}, {"a": "x"}]),
        # What is joined is closed together.
        ({"allOf": [A, B]}, [{"a": 1, "b": 2}], [{"a": 1, "c": 1}]),
        (A | {"allOf": [B, {"allOf": [{"properties": {"c": I}}]}]}, [{"a": 1, "b": 2, "c": 3}], [{"d": 1}]),
        (DEFINED | {"allOf": [REFERENCE], "description": "."}, [{"a": 1}], [{"b": 1}]),
        (DEFINED | REFERENCE | B, [{"a": 1, "b": 2}], [{"c": 1}, {"a": "x"}]),
        (
            DEFINED | {"properties": {"one": REFERENCE | B, "other": REFERENCE}},
            [{"one": {"a": 1, "b": 1}, "other": {"a": 1}}],
            [{"other": {"b": 1}}, {"one": {"c": 1}}],
        ),
        ({"allOf": [A, {"patternProperties": {"^x": I}}]}, [{"a": 1, "x1": 1}], [{"b": 1}]),
        (A | {"anyOf": [HAS_B, {"properties": {"c": I}}]}, [{"a": 1, "b": 1}, {"c": 1}], [{"b": 1, "c": 1}]),
        (A | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{"a": 1, "c": 1}]),
        (
            {"allOf": [{"properties": {"x": A}}, {"properties": {"x": HAS_B}}]},
            [{"x": {"a": 1, "b": 1}}],
            [{"y": 1}],
        ),
        # Recursive, as trees are.
        (
            {"$ref": "#/$defs/T", "$defs": {"T": {"properties": {"left": {"$ref": "#/$defs/T"}}}}},
            [{"left": {"left": {}}}],
            [{"right": {}}, {"left": {"right": {}}}],
        ),
        ({"properties": {"left": {"$ref": "#"}}}, [{"left": {"left": {}}}], [{"left": {"right": {}}}]),
        # One of several.
        (
            {"type": "object", "oneOf": [HAS_A | {"type": "object"}, HAS_B | {"type": "object"}]},
            [{"a": 1}, {"b": 1}],
            [{}, {"a": 1, "b": 1}, {"a": 1, "c": 1}],
        ),
        (
            {"oneOf": [{"type": "null"}, A | {"type": "object"}]},
            [{"a": 1}, None],
            [{"b": 1}],
        ),
        # No schemas, though they look like some.
        ({"const": A}, [A], [{"properties": {}}]),
        ({"properties": {"properties": {"const": A}}}, [{"properties": A}], []),
        ({"enum": [{"$ref": "#"}], "type": "object"}, [{"$ref": "#"}], []),
    ],
)
def test_what_is_admitted(schema: dict[str, Any], admitted: list[Any], refused: list[Any]) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    for value in admitted:
        assert admits(schema, value) and validator.is_valid(value), value
    for value in refused:
        assert not admits(schema, value), value


def test_one_of_objects_that_only_closing_would_tell_apart_is_refused_as_it_is() -> None:
    """{"a": 1} would be of one kind; by the schema it is of both."""
    either = {"$defs": {"A": A | {"type": "object"}}, "oneOf": [REFERENCE, B | {"type": "object"}]}
    assert "oneOf" in matcher(either).get_error()


def test_properties_come_in_the_schemas_order() -> None:
    schema = HAS_B | {"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": HAS_A}}
    assert admits(schema, {"b": 1, "a": 1}) and not admits(schema, {"a": 1, "b": 1})


def test_what_is_open_stays_open_on_demand() -> None:
    assert json.loads(Grammar.json_schema(A, is_closed=False).text) == A


def test_what_is_no_schema_is_left_for_the_compiler() -> None:
    broken = {"properties": 3, "allOf": 4, "anyOf": {}, "required": "x", "$ref": 5, "type": [6], "$defs": []}
    assert closed(broken) == broken


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        # Definition i in 2^i ways.
        (
            {"$ref": "#/$defs/0", "$defs": {
                str(i): {"anyOf": [
                    {"properties": {f"{name}{i}": {}}, "$ref": f"#/$defs/{i + 1}"} for name in "xy"
                ]} for i in range(40)
            } | {"40": {}}},
            "too many parts",
        ),
        ({"allOf": [{"properties": {str(i): {}}} for i in range(9000)]}, "too many parts"),
    ],
)  # fmt: skip
def test_a_schema_that_grows_without_end_is_refused(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameter, match=said):
        Grammar.json_schema(schema)


def test_a_schema_that_nests_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(900):
        schema = {"items": schema}
    with pytest.raises(InvalidParameter, match="nested too deeply"):
        Grammar.json_schema(schema)
