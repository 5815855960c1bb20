"""Random JSON schemas whose texts are short, so that a model that knows nothing comes to their end."""

from __future__ import annotations

import random
from typing import Any

NAMES = ["name", "age", "the water", "größe", "中文", "a", "ab", "abc", 'qu"ote', "b\\s", "😀"]
WORDS = ["alpha", "beta", "the water runs down", "alphabet", "é", "中文", "😀👨‍👩‍👧", "", " ", 'a"b', "\n"]
PATTERNS = ["^[a-z]{1,4}$", "^\\d{3}-\\d{2}$", "^(the )?water$", "^[éà中]{2}$"]


def random_schema(dice: random.Random, depth: int = 2) -> dict[str, Any]:
    """An object at the top."""
    names = dice.sample(NAMES, dice.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_value(dice, depth - 1) for name in names},
        "required": [name for name in names if dice.random() < 0.7],
        "additionalProperties": False,
    }


def random_value(dice: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "pattern", "integer", "number", "boolean", "null", "enum", "const", "date"]
    match dice.choice(kinds + (["object", "array", "any"] * 2 if depth > 0 else [])):
        case "string":
            return {"type": "string", "maxLength": dice.randint(0, 6)}
        case "pattern":
            return {"type": "string", "pattern": dice.choice(PATTERNS)}
        case "integer":
            low = dice.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + dice.choice((0, 7, 1000))}
        case "number":
            return {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 100}
        case "boolean":
            return {"type": "boolean"}
        case "null":
            return {"type": "null"}
        case "enum":
            return {"enum": dice.sample([*WORDS, 3, None, True, 1.5], dice.randint(1, 5))}
        case "const":
            return {"const": dice.choice(WORDS)}
        case "date":
            return {"type": "string", "format": "date"}
        case "object":
            return random_schema(dice, depth)
        case "array":
            low = dice.randint(0, 2)
            items = random_value(dice, depth - 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + dice.randint(0, 2)}
    return {"anyOf": [random_value(dice, depth - 1) for _ in range(dice.randint(1, 3))]}


def random_open_schema(dice: random.Random) -> dict[str, Any]:
    """As clients write them: nothing is said of other properties, definitions are shared and refer to each
    other, and objects are put together of several schemas."""
    schema = _random_joined(dice, 2)
    schema["$defs"] = {name: _random_joined(dice, 1) for name in DEFINITIONS}
    return schema


#: Names of definitions. None of the properties has one of theirs.
DEFINITIONS = ["One", "Other/~", "Third"]


def _random_joined(dice: random.Random, depth: int) -> dict[str, Any]:
    """An object, of one schema or several."""
    own = _random_named(dice, depth)
    match dice.choice(["plain", "allOf", "anyOf", "oneOf", "$ref", "allOf of a reference", "all"]):
        case "plain":
            return own
        case "allOf":
            return {"allOf": [_random_named(dice, depth), _random_named(dice, depth)]}
        case "anyOf":
            return own | {"anyOf": [_random_named(dice, depth), _random_named(dice, depth)]}
        case "oneOf":
            kinds = [{"properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("x", "y")]
            branches = [_random_named(dice, depth), _random_named(dice, depth)]
            if dice.random() < 0.6:
                branches = [{"allOf": [kind, each]} for kind, each in zip(kinds, branches, strict=True)]
            return own | {"oneOf": branches}
        case "$ref":
            return own | {"$ref": _random_reference(dice)}
        case "allOf of a reference":
            return {"description": "no more than it", "allOf": [{"$ref": _random_reference(dice)}]}
    return own | {"allOf": [{"$ref": _random_reference(dice)}, {"anyOf": [_random_named(dice, depth), own]}]}


def _random_named(dice: random.Random, depth: int) -> dict[str, Any]:
    names = dice.sample(NAMES, dice.randint(1, 3))
    properties = {name: _random_member(dice, depth - 1) for name in names}
    required = [name for name in names if dice.random() < 0.5]
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if dice.random() < 0.15:
        schema["patternProperties"] = {"^x[0-9]$": {"type": "integer", "minimum": 0, "maximum": 9}}
    return schema


def _random_member(dice: random.Random, depth: int) -> dict[str, Any]:
    if depth <= 0:
        return random_value(dice, 0)
    match dice.choice(["value", "object", "array", "reference"]):
        case "object":
            return _random_joined(dice, depth)
        case "array":
            return {"type": "array", "items": _random_joined(dice, depth), "maxItems": 2}
        case "reference":
            return {"anyOf": [{"type": "null"}, {"$ref": _random_reference(dice)}]}
    return random_value(dice, 0)


def _random_reference(dice: random.Random) -> str:
    return "#/$defs/" + dice.choice(DEFINITIONS).replace("~", "~0").replace("/", "~1")
