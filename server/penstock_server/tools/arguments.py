"""The arguments of a call as an object, for APIs whose calls hold objects and no text."""

from __future__ import annotations

import json
from typing import Any

#: The member that holds the arguments if the model wrote no JSON object. The name is Anthropic's.
INVALID_JSON = "INVALID_JSON"


def read_arguments(text: str) -> dict[str, Any]:
    """Nothing binds a model to write an object, unless the tool is strict."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: text}
