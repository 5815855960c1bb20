"""Numbers of JSON schemas against the package jsonschema: texts are valid, no value is missing."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from penstock.errors import InvalidParameter
from penstock.generation.grammars.grammar import Grammar
from penstock.generation.grammars.grammar_trial import LIMITS, source


class Bytes:
    """A vocabulary of single bytes, as llguidance wants to see it."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"")
    special_token_ids = (256,)
    eos_token_id = 256

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


BYTES = Bytes()
TOKENIZER = LLTokenizer(BYTES)  # type: ignore[arg-type]


def admits(schema: dict[str, Any], text: str) -> bool:
    """Raises InvalidParameter or ValueError for a schema that is refused."""
    grammar = Grammar.json_schema(schema)
    matcher = LLMatcher(TOKENIZER, source(grammar.kind, grammar.text), log_level=0, limits=LIMITS)
    if matcher.get_error():
        raise ValueError(matcher.get_error())
    return all(matcher.try_consume_tokens([byte]) for byte in text.encode()) and matcher.is_accepting()


def is_valid(schema: dict[str, Any], text: str) -> bool:
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    return bool(Draft202012Validator(exact).is_valid(json.loads(text, parse_float=Decimal)))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.01}, ["0.001", "0.01"], ["0", "-0", "0.0", "0.011"]),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, ["-0.5", "-0.001"], ["0", "-0", "-0.0"]),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, ["0.25"], ["0"]),
        ({"exclusiveMinimum": 0, "minimum": 0.2}, ["0.2"], ["0", "0.1"]),
        ({"minimum": 0.2, "exclusiveMinimum": 0}, ["0.2"], ["0", "0.1"]),
        ({"type": "integer", "exclusiveMinimum": 0, "maximum": 2}, ["1", "2"], ["0", "3"]),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, ["1.1", "1.5", "1.00000000000001"], ["1", "1.0", "1.6"]),
        ({"exclusiveMinimum": 36.0, "exclusiveMaximum": 36.6}, ["36.5"], ["36", "36.0", "36.6"]),
        ({"exclusiveMaximum": -3, "minimum": -3.5}, ["-3.5", "-3.1"], ["-3", "-3.0", "-3.6"]),
        ({"exclusiveMaximum": -3, "maximum": -3.2}, ["-3.2"], ["-3", "-3.1"]),
        ({"allOf": [{"exclusiveMinimum": 7}, {"maximum": 7.5}]}, ["7.25"], ["7", "7.0"]),
        ({"exclusiveMinimum": 10**13, "maximum": 10**13 + 0.5}, [f"{10**13}.1"], [f"{10**13}"]),
        ({"exclusiveMinimum": 10**15}, [f"{10**15}.5", f"{10**15 + 1}"], [f"{10**15}"]),
        ({"exclusiveMinimum": -1, "exclusiveMaximum": 1}, ["-0.9999999999999999", "0"], ["-1", "1"]),
        ({"type": "integer", "exclusiveMinimum": 5}, ["6", "10"], ["5", "5.5"]),
        ({"allOf": [{"type": "integer"}, {"exclusiveMaximum": -5}]}, ["-6", "-10"], ["-5", "-5.5"]),
        ({"type": "integer", "minimum": 5, "exclusiveMinimum": -1e300}, ["5"], ["3"]),
        ({"type": "integer", "exclusiveMinimum": -1e300, "minimum": 5}, ["5"], ["3"]),
        ({"type": "integer", "maximum": 5, "exclusiveMaximum": 2**63 - 1}, ["5"], ["6"]),
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 0.01}, ["0.005", "0.01"], ["0", "0.0"]),
        ({"maximum": 0, "exclusiveMaximum": True, "minimum": -0.5}, ["-0.5", "-0.2"], ["0", "-0", "-0.0"]),
        ({"exclusiveMinimum": True, "minimum": 1, "maximum": 1.5}, ["1.2", "1.5"], ["1", "1.0"]),
        ({"minimum": 1, "exclusiveMinimum": False, "maximum": 1.5}, ["1", "1.5"], ["0.9"]),
        ({"const": 2**53}, [str(2**53)], [str(2**53 + 1)]),
        ({"enum": [-(2**53), 1.0]}, [str(-(2**53)), "1"], ["1.5"]),
        ({"const": -0.0}, ["0"], ["1"]),
        ({"type": "integer", "maximum": 2**63 - 1}, [str(2**63 - 1)], [str(2**63)]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["0", str(2**62 + 1)], ["-1", str(2**64)]),
        ({"type": "integer", "minimum": -(2**63)}, [str(2 - 2**62)], [str(-(2**63) - 1)]),
        ({"type": "string", "minLength": 2.0}, ['"ab"'], ['"a"']),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 1e0}, ["[null]"], ["[null,null]"]),
        ({"type": "integer", "default": float("inf"), "examples": [2**70]}, ["7"], ["x"]),
    ],
)
def test_numbers_are_enforced(schema: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not admits(schema, text)] == []
    assert [text for text in wrong if admits(schema, text)] == []


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"const": 2**53 + 1}, "const is 9007199254740993,"),
        ({"properties": {"id": {"enum": ["a", 2**60]}}}, r"properties.id.enum\[1\] is 1152921504606846976,"),
        ({"items": {"const": {"a": [1e400]}}}, r"items.const.a\[0\] is inf,"),
        ({"anyOf": [True, {"const": 123456789.123456789}]}, r"anyOf\[1\].const is 123456789.12345679,"),
        ({"minimum": 2**53 + 1}, "minimum is 9007199254740993,"),
        ({"exclusiveMinimum": 2**53}, "exclusiveMinimum is 9007199254740992,"),
        ({"exclusiveMaximum": -(2**53)}, "exclusiveMaximum is -9007199254740992,"),
        ({"exclusiveMaximum": 2**53 + 2}, "exclusiveMaximum is 9007199254740994,"),
        ({"maximum": 0.9027179113702211}, "maximum is 0.9027179113702211,"),
        ({"maximum": -1e400}, "maximum is -inf,"),
        ({"minimum": float("nan")}, "minimum is nan,"),
        ({"minimum": 1e20}, r"minimum is 1e\+20,"),
        ({"multipleOf": -2}, "multipleOf is -2; it must be above 0"),
        ({"multipleOf": float("inf")}, "multipleOf is inf,"),
        ({"$defs": {"a": {"maximum": 2**53 + 1}}, "$ref": "#/$defs/a"}, "\\$defs.a.maximum is"),
    ],
)
def test_other_numbers_are_refused_with_their_place(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidParameter, match=f"the JSON schema can't be used: {place}"):
        Grammar.json_schema(schema)


def test_random_bounds_admit_valid_numbers_and_all_of_them() -> None:
    dice = random.Random(7)
    num_admitted = 0
    for _ in range(120):
        schema = random_number_schema(dice)
        grammar = Grammar.json_schema(schema)
        start = LLMatcher(TOKENIZER, source(grammar.kind, grammar.text), log_level=0, limits=LIMITS)
        for text in texts_near(schema, dice):
            if start.get_error():
                assert not is_valid(schema, text), (schema, text, start.get_error())
                continue
            if spelled(start, text):
                assert is_valid(schema, text), (schema, text)
                num_admitted += 1
            elif is_valid(schema, text) and not text.startswith("-0"):
                # llguidance wants as many decimals as the bounds have.
                shortest = format(Decimal(text).normalize(), "f")
                others = [shortest] + [
                    shortest + "." * ("." not in text) + "0" * zeros for zeros in range(13)
                ]
                assert any(spelled(start, other) for other in others), (schema, text)
    assert num_admitted > 900


def spelled(start: LLMatcher, text: str) -> bool:
    matcher = start.deep_copy()
    return all(matcher.try_consume_tokens([byte]) for byte in text.encode()) and matcher.is_accepting()


def random_number_schema(dice: random.Random) -> dict[str, Any]:
    kind = dice.choice(("integer", "number"))
    if dice.random() < 0.1:
        return {"type": kind, dice.choice(("const", "minimum", "maximum")): random_number(dice, kind)}
    low, high = sorted((random_number(dice, kind), random_number(dice, kind)))
    schema: dict[str, Any] = {"type": kind}
    schema |= dice.choice(({}, {"minimum": low}, {"exclusiveMinimum": low}))
    schema |= dice.choice(({}, {"maximum": high}, {"exclusiveMaximum": high}))
    if dice.random() < 0.2:
        schema["multipleOf"] = dice.choice((1, 3, 10, 0.5, 0.1, 0.25, 1.5))
    return schema


def random_number(dice: random.Random, kind: str) -> int | float:
    match dice.randrange(7 if kind == "number" else 4):
        case 0:
            return 0
        case 1:
            return dice.randint(-20, 20)
        case 2:
            return dice.choice((1, -1)) * (10 ** dice.randint(1, 15) + dice.randint(-1, 1))
        case 3:
            return dice.randint(-(2**53), 2**53) >> dice.randint(0, 52)
        case 4:
            return float(f"{dice.choice('+-')}1e{dice.randint(-12, 15)}")
        case 5:
            return float(f"{dice.choice('+-')}{dice.randint(1, 9999)}e{dice.randint(-9, 3)}")
    return round(dice.uniform(-3, 3), dice.randint(0, 9))


def texts_near(schema: dict[str, Any], dice: random.Random) -> list[str]:
    """Texts of numbers at the schema's numbers, between them and beside them."""
    found = {"0", "-0", "0.0", "-0.0", "1", "-1", "0.5"}
    numbers = [Decimal(repr(value)) for name, value in schema.items() if name != "type"]
    for number in numbers:
        step = Decimal(10) ** dice.randint(-12, 2)
        near = (
            number,
            number + 1,
            number - 1,
            number + step,
            number - step,
            number * 2,
            number / 10,
            -number,
        )
        found |= {format(value, "f") for value in near}
    if len(numbers) > 1:
        share = Decimal(str(round(dice.random(), 3)))
        found.add(format(numbers[0] + (numbers[1] - numbers[0]) * share, "f"))
    return sorted(found | {f"{text}{0 if '.' in text else '.0'}" for text in found})
