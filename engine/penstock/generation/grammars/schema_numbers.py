"""Schema numbers: the numbers of a JSON schema, written so that llguidance enforces them exactly, or refused.

llguidance computes with 64-bit floats. An integer beyond 2**53 becomes a neighbour of it, and a fraction of
more than 15 digits gets other last digits. An exclusive bound of 0 admits 0 where the other bound is below 1.
Lengths such as 2.0, which JSON Schema calls integers, are refused.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

from penstock.generation.grammars.schema_facts import MAPS, Schema

#: Keywords whose value is a number of characters, items or properties.
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
#: Keywords whose values are constants of an answer.
_CONSTANTS = ("const", "enum")
#: Keywords whose values no answer is compared with.
_NOTES = frozenset({"default", "examples", "title", "description", "$comment", "x-guidance"})
#: Digits of a decimal number that a 64-bit float keeps.
_MAX_DIGITS = 15
_MAX_INTEGER = 2**53
#: The bounds of 64-bit integers stand in many schemas, where they mean no bound. llguidance takes none beyond
#: these. The lower one is the lowest that a float holds above -(2**63), with which llguidance fails.
_LEAST, _MOST = -(2**63) + 1024, 2**63 - 1
#: The least number above 0 of an answer where only 0 itself is excluded.
_ABOVE_ZERO = 1e-30


def exact_numbers(schema: Any, place: str = "") -> Any:
    """The schema with numbers that llguidance takes exactly. An answer to the new schema is one to the old
    schema.

    place: where the schema stands, for errors ("properties.id"). Raises ValueError, with the place, for a
    number that can't be enforced."""
    if isinstance(schema, list):
        return [exact_numbers(item, f"{place}[{index}]") for index, item in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    result: Schema = {}
    for key, value in schema.items():
        there = f"{place}.{key}" if place else str(key)
        if key in _NOTES:
            result[key] = _readable(value)
        elif key in _CONSTANTS:
            result[key] = _constant(value, there)
        elif key in MAPS and isinstance(value, dict):
            result[key] = {name: exact_numbers(part, f"{there}.{name}") for name, part in value.items()}
        elif _is_number(value):
            result |= _keyword(key, value, there)
        else:
            result[key] = exact_numbers(value, there)
    return _without_zero(result)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _keyword(key: str, value: int | float, place: str) -> Schema:
    """A keyword with a number, as llguidance takes it."""
    if key in _COUNTS:
        return {key: int(value) if math.isfinite(value) and value == int(value) else value}
    if key in _LOWER and value <= _LEAST:
        return {"minimum": _LEAST}
    if key in _UPPER and value >= _MOST:
        return {"maximum": _MOST}
    if key in _LOWER or key in _UPPER:
        _check(value, place)
        if key.startswith("exclusive") and abs(value) > _MAX_INTEGER:
            raise _unenforceable(value, place)
    if key in _LOWER and value > _MOST or key in _UPPER and value < _LEAST or not math.isfinite(value):
        raise _unenforceable(value, place)
    if key == "multipleOf" and value <= 0:
        raise ValueError(f"{place} is {value}; it must be above 0")
    return {key: value}


def _without_zero(schema: Schema) -> Schema:
    """The schema with another bound in place of one that excludes 0 alone."""
    for key, bound, nearest, further in (
        ("exclusiveMinimum", "minimum", _ABOVE_ZERO, max),
        ("exclusiveMaximum", "maximum", -_ABOVE_ZERO, min),
    ):
        if _is_number(schema.get(key)) and schema[key] == 0 and _is_number(schema.get(bound, 0)):
            rest = {name: value for name, value in schema.items() if name != key}
            schema = rest | {bound: further(nearest, schema.get(bound, nearest))}
    return schema


def _constant(value: Any, place: str) -> Any:
    match value:
        case list():
            return [_constant(item, f"{place}[{index}]") for index, item in enumerate(value)]
        case dict():
            return {key: _constant(item, f"{place}.{key}") for key, item in value.items()}
        case int() | float() if not isinstance(value, bool):
            _check(value, place)
            return value or 0  # not -0.0, whose only text would be "-0"
    return value


def _check(value: int | float, place: str) -> None:
    """Raises ValueError for a number that llguidance takes for another one."""
    if isinstance(value, float) and not math.isfinite(value):
        raise _unenforceable(value, place)
    exact = Decimal(value) if isinstance(value, int) else Decimal(repr(value))
    if exact == exact.to_integral_value() and abs(exact) <= _MAX_INTEGER:
        return
    digits = "".join(map(str, exact.as_tuple().digits)).strip("0")
    if len(digits) > _MAX_DIGITS:
        raise _unenforceable(value, place)


def _unenforceable(value: int | float, place: str) -> ValueError:
    return ValueError(
        f"{place} is {value}, a number that can't be enforced exactly: numbers here may have {_MAX_DIGITS} "
        f"digits, and integers reach to {_MAX_INTEGER}. Round it, or let the value be a string"
    )


def _readable(value: Any) -> Any:
    """A note without the numbers that JSON does not have."""
    match value:
        case list():
            return [_readable(item) for item in value]
        case dict():
            return {key: _readable(item) for key, item in value.items()}
        case float() if not math.isfinite(value):
            return str(value)
    return value
