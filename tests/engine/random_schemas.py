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
