"""The JSON that the text of a parameter stands for, by the function's JSON Schema. In the formats that are
XML, models write strings as they are, and other values as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock_server.protocol.tools import Function
from penstock_server.tools.schemas import arguments_schema

_WORDS = {"True": True, "False": False, "None": None}
#: The types of JSON Schema that a parsed value has.
_JSON_TYPES = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
}
#: How deep schemas are searched for types.
_MAX_DEPTH = 8


class ParameterValues:
    """The values of the parameters of some functions."""

    def __init__(self, functions: Sequence[Function], unknown_is_text: bool) -> None:
        """unknown_is_text: the value of a parameter without a type is a string; otherwise it is JSON if it
        can be."""
        self._schemas = {each.name: arguments_schema(each) for each in functions}
        self._unknown_is_text = unknown_is_text

    def json_of(self, function: str, parameter: str, text: str) -> str:
        """The value as JSON."""
        root, properties = self._schemas.get(function, {}), self._properties(function)
        schema = None if properties is None else properties.get(parameter)
        types = types_of(schema, root)
        if "null" in types and text.strip().lower() in ("null", "none"):
            return "null"
        if "string" in types or (not types and self._unknown_is_text):
            return _of_another_type(text.strip(), types) or json.dumps(text, ensure_ascii=False)
        return json_of(text.strip() if types else text)

    def is_function(self, name: str) -> bool:
        return name in self._schemas

    def required(self, function: str) -> frozenset[str]:
        """The parameters that a call must have."""
        named = self._schemas.get(function, {}).get("required")
        return frozenset(map(str, named) if isinstance(named, list) else ())

    def is_parameter(self, function: str, name: str) -> bool:
        """Whether a function takes a parameter: one without a list of its own takes all."""
        properties = self._properties(function)
        takes_others = self._schemas.get(function, {}).get("additionalProperties")
        return not properties or name in properties or bool(takes_others)

    def _properties(self, function: str) -> dict[str, Any] | None:
        properties = self._schemas.get(function, {}).get("properties")
        return properties if isinstance(properties, dict) else None


def _of_another_type(text: str, types: frozenset[str]) -> str | None:
    """The text, if it is JSON of a type that the schema allows beside strings, as 42 is where it allows
    integers."""
    if types <= {"string", "null"}:
        return None
    try:
        value = json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return None
    return text if _JSON_TYPES.get(type(value), frozenset()) & types else None


def types_of(schema: Any, root: Any = None, depth: int = 0) -> frozenset[str]:
    """The types that a schema allows, as far as it names them."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return frozenset()
    named = schema.get("type", [])
    found = {named} if isinstance(named, str) else {each for each in named if isinstance(each, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(key) or ():
            found |= types_of(each, root, depth + 1)
    constants = [schema["const"]] if "const" in schema else schema.get("enum") or []
    if not found and constants:
        found = {"string" if isinstance(each, str) else "other" for each in constants}
    reference = schema.get("$ref")
    if not found and isinstance(reference, str) and reference.startswith("#/"):
        return types_of(_target(root, reference), root, depth + 1)
    return frozenset(found)


def _target(root: Any, reference: str) -> Any:
    """The part of a schema that a reference names."""
    for key in reference.removeprefix("#/").split("/"):
        root = root.get(key) if isinstance(root, dict) else None
    return root


def json_of(text: str) -> str:
    """The text itself if it is JSON, else a JSON string. Models at times write Python's True, False, None."""
    if text in _WORDS:
        return json.dumps(_WORDS[text])
    try:
        json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text


def _no_json(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
