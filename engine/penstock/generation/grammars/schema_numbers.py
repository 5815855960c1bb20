"""Schema numbers: the numbers of a JSON schema, written so that llguidance enforces them exactly, or refused.

llguidance computes with 64-bit floats. An integer beyond 2**53 becomes a neighbour of it, and a fraction of
more than 15 digits gets other last digits. A whole exclusive bound is admitted itself where the other bound
is less than 1 away. Lengths such as 2.0, which JSON Schema calls integers, are refused.
"""

from __future__ import annotations

import math
import reprlib
from decimal import Decimal
from typing import Any, TypeGuard

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
    for key, value in _with_exclusive_numbers(schema).items():
        there = f"{place}.{key}" if place else str(key)
        if key in _NOTES:
            result[key] = _readable(value)
        elif key in _CONSTANTS:
            result[key] = _constant(value, there)
        elif key in MAPS and isinstance(value, dict):
            result[key] = {name: exact_numbers(part, f"{there}.{name}") for name, part in value.items()}
        elif _is_number(value):
            for name, bound in _keyword(key, value, there).items():
                result[name] = _stricter(name, bound, result.get(name, bound))
        else:
            result[key] = exact_numbers(value, there)
    return _without_whole(result)


def _with_exclusive_numbers(schema: Schema) -> Schema:
    """The schema with numbers for the true and false that older schemas (draft 4, OpenAPI 3.0) have beside a
    bound to say whether it is exclusive."""
    for bound, key in (_LOWER, _UPPER):
        if isinstance(is_exclusive := schema.get(key), bool):
            schema = {name: item for name, item in schema.items() if name != key}
            if is_exclusive and bound in schema:
                schema[key] = schema.pop(bound)
    return schema


def _is_number(value: Any) -> TypeGuard[int | float]:
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
        if key.startswith("exclusive") and abs(value) >= _MAX_INTEGER:
            raise _unenforceable(value, place)
    if key in _LOWER and value > _MOST or key in _UPPER and value < _LEAST or not math.isfinite(value):
        raise _unenforceable(value, place)
    if key == "multipleOf" and value <= 0:
        raise ValueError(f"{place} is {value}; it must be above 0")
    return {key: value}


def _stricter(name: str, first: Any, second: Any) -> Any:
    """The stricter one of two values of a keyword. What is no number stays, so that llguidance names it."""
    if not _is_number(second) or not _is_number(first):
        return second
    return max(first, second) if name in _LOWER else min(first, second)


def _without_whole(schema: Schema) -> Schema:
    """The schema with an inclusive bound in place of each exclusive one that llguidance may admit itself: a
    whole number with the numbers of its own digits beyond it. A bound that leaves room towards 0, such as an
    exclusiveMaximum of 1, is taken exactly."""
    for key, bound, away in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        value = schema.get(key)
        if not _is_number(value) or value != int(value) or value * away < 0:
            continue
        nearest = _beyond(int(value) * away)
        if nearest is not None and _is_number(schema.get(bound, 0)):
            rest = {name: item for name, item in schema.items() if name != key}
            schema = rest | {bound: _stricter(bound, away * nearest, schema.get(bound, away * nearest))}
    return schema


def _beyond(whole: int) -> float | None:
    """The next number above a whole number that has not more digits than llguidance keeps. None where that is
    a whole number, too: no bound that is taken then lies between the two."""
    num_decimals = _MAX_DIGITS - len(str(whole))
    if whole == 0:
        return _ABOVE_ZERO
    return float(whole + Decimal(1).scaleb(-num_decimals)) if num_decimals > 0 else None


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
        f"{place} is {reprlib.repr(value)}, a number that can't be enforced exactly: numbers here may have "
        f"{_MAX_DIGITS} digits, and integers reach to {_MAX_INTEGER}. Round it, or let the value be a string"
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
