"""Schema facts: which properties a JSON schema names, and which values the schema excludes. Each fact comes
from the keywords of one schema or of several; no reference is followed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

#: Keywords whose values map names to schemas.
MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
NAMING_KEYWORDS = frozenset({"properties", "patternProperties"})
_OPEN_KEYWORDS = frozenset({"additionalProperties", "unevaluatedProperties"})
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
#: Keywords whose values are data, so that "$ref" in them is no reference.
_DATA = frozenset({"const", "enum", "default", "examples"})

Schema = dict[str, Any]


@dataclass(frozen=True)
class Names:
    """What one schema or several say of an object's properties."""

    #: In the schema's order, which is the order in an answer. Properties that are only required are included.
    properties: tuple[str, ...] = ()
    #: The properties whose values have a schema.
    described: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    #: Whether properties are named at all: {"type": "object"} is any object.
    is_naming: bool = False
    #: Whether a schema itself says which other properties there may be.
    is_open: bool = False

    @classmethod
    def of_all(cls, names: Sequence[Names]) -> Names:
        return cls(
            tuple(dict.fromkeys(chain.from_iterable(each.properties for each in names))),
            frozenset(chain.from_iterable(each.described for each in names)),
            tuple(dict.fromkeys(chain.from_iterable(each.patterns for each in names))),
            any(each.is_naming for each in names),
            any(each.is_open for each in names),
        )

    def __or__(self, other: Names) -> Names:
        return self.of_all((self, other))


@dataclass(frozen=True)
class Values:
    """A set of values, as far as types and lists of constants describe it."""

    types: frozenset[str]
    #: The constants as JSON. None: no list of constants is given, or the list has constants other than
    #: strings, integers, booleans and null, whose JSON may differ though they are equal.
    constants: frozenset[str] | None

    @classmethod
    def of(cls, schemas: Iterable[Any]) -> Values:
        """The values that all the schemas admit."""
        types = frozenset(_TYPES)
        constants: frozenset[str] | None = None
        for schema in schemas:
            if isinstance(schema, dict):
                types &= types_of(schema)
                constants = _both(constants, _constants(schema))
        return cls(types, constants)

    def excludes(self, other: Values) -> bool:
        if self.constants is not None and other.constants is not None:
            return self.constants.isdisjoint(other.constants)
        return self.types.isdisjoint(other.types)


_ANYTHING = Values(frozenset(_TYPES), None)


@dataclass(frozen=True)
class Facts:
    """What is true of each value that a schema admits."""

    values: Values
    required: frozenset[str]
    properties: dict[str, Values]

    @classmethod
    def of(cls, parts: Sequence[Schema]) -> Facts:
        """parts: schemas that all hold for the value."""
        properties: dict[str, list[Any]] = {}
        for part in parts:
            for name, value in members(part, "properties").items():
                properties.setdefault(name, []).append(value)
        required = frozenset(name for part in parts for name in strings(part, "required"))
        return cls(Values.of(parts), required, {name: Values.of(each) for name, each in properties.items()})

    def excludes(self, other: Facts) -> bool:
        """Whether no value can have both facts: the types differ, or a required property tells them apart."""
        return self.values.excludes(other.values) or any(
            self.properties.get(name, _ANYTHING).excludes(other.properties.get(name, _ANYTHING))
            for name in self.required | other.required
        )

    def asks_more_than(self, names: Names) -> bool:
        """Whether an object with no other properties than these names lacks a required one."""
        is_bounded = names.is_naming and not names.is_open and not names.patterns
        return is_bounded and not self.required <= set(names.properties)


def types_of(schema: Schema) -> frozenset[str]:
    named = schema.get("type")
    types = frozenset([named] if isinstance(named, str) else strings(schema, "type") or _TYPES)
    return types | {"integer"} if "number" in types else types


def _both(one: frozenset[str] | None, other: frozenset[str] | None) -> frozenset[str] | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _constants(schema: Schema) -> frozenset[str] | None:
    values = [schema["const"]] if "const" in schema else items(schema, "enum")
    if not values or not all(value is None or isinstance(value, str | int) for value in values):
        return None
    return frozenset(json.dumps(value) for value in values)


def own_names(schema: Schema) -> Names:
    """What a schema itself says of an object's properties, without its parts."""
    described = members(schema, "properties")
    properties = tuple(dict.fromkeys([*described, *strings(schema, "required")]))
    patterns = tuple(members(schema, "patternProperties"))
    least = schema.get("minProperties", 0)
    has_too_few = not patterns and isinstance(least, int) and least > len(properties)
    is_open = has_too_few or not _OPEN_KEYWORDS.isdisjoint(schema)
    is_naming = not NAMING_KEYWORDS.isdisjoint(schema)
    return Names(properties, frozenset(described), patterns, is_naming, is_open)


def moved(schema: Any, place: str) -> Any:
    """A whole schema, changed into a part at `place` of another schema: its references begin at `place`."""
    if isinstance(schema, list):
        return [moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result: Schema = {}
    for key, value in schema.items():
        if key in MAPS and isinstance(value, dict):
            result[key] = {name: moved(part, place) for name, part in value.items()}
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            result[key] = place + value[1:]
        else:
            result[key] = value if key in _DATA else moved(value, place)
    return result


def members(schema: Schema, key: str) -> dict[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, dict) else {}


def items(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def strings(schema: Schema, key: str) -> list[str]:
    return [item for item in items(schema, key) if isinstance(item, str)]
