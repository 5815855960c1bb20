"""Closed schemas: objects get the properties that a JSON schema names and no others, unless the schema says
otherwise.

JSON Schema lets an object have any further property. A client who names three properties wants these three,
and a small model that may add properties invents more of them until its token limit.
`additionalProperties` and `unevaluatedProperties` are the client's own word, which stays.

Several schemas may hold for one object: allOf, anyOf and oneOf, and $ref beside other keywords. None of these
schemas may forbid what another one names. So each is closed with the names of the others as well, and a
definition that is closed in two ways is written twice. A closed schema admits a part of what the schema
admits.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from penstock.generation.grammars.schema_facts import (
    MAPS,
    NAMING_KEYWORDS,
    Names,
    Schema,
    members,
    moved,
    types_of,
)
from penstock.generation.grammars.schema_parts import ALTERNATIVES, NOTHING, Effort, SchemaParts

#: Keywords that hold a schema, or a list of schemas. Other keywords' values are data here. llguidance refuses
#: other keywords that hold schemas, such as `not`, which closing would turn into its opposite.
_VALUES = frozenset({"items", "prefixItems", "additionalItems", "additionalProperties"})


def closed(schema: Schema) -> Schema:
    """The schema, closed. What is no schema stays as it is. Raises ValueError for a schema that is too large,
    and RecursionError for one that nests too deeply."""
    return _Closer(schema).whole()


class _Closer:
    """Writes one schema, the root, again."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._effort = Effort()
        self._parts = SchemaParts(root, self._effort)
        #: New definitions by name.
        self._definitions: Schema = {}
        self._numbers = count()
        #: A pointer and others' names -> the name of what stands there, closed with the others' names.
        self._copies: dict[tuple[str, Names], str] = {}
        #: The definition that is the whole schema as it was, where something refers to it.
        self._name_of_original = self._new_name()

    def whole(self) -> Schema:
        schema: Schema = self._closed(self._root, NOTHING)
        if self._definitions:
            schema = schema | {"$defs": members(schema, "$defs") | self._definitions}
        return schema

    def _closed(self, schema: Any, others: Names) -> Any:
        """others: what other schemas say of the same object."""
        if isinstance(schema, list):
            return [self._closed(item, others) for item in schema]
        if not isinstance(schema, dict):
            return schema
        self._effort.spend(1 + len(others.properties) + len(others.patterns))
        result = {key: self._keyword(schema, key, others) for key in schema}
        names = self._parts.names_of(schema) | others
        if not names.is_naming or names.is_open or "object" not in types_of(schema):
            return result
        if NAMING_KEYWORDS.isdisjoint(schema) and next(self._parts.of(schema), None):
            return result  # its parts close the object
        return result | _closing(result, names)

    def _keyword(self, schema: Schema, key: str, others: Names) -> Any:
        value, beside = schema[key], self._parts.names_beside
        if key == "properties" and isinstance(value, dict):
            return self._properties(schema, value, others)
        if key in MAPS and isinstance(value, dict):
            return {name: self._closed(part, NOTHING) for name, part in value.items()}
        if key in _VALUES:
            return self._closed(value, NOTHING)
        if key == "$ref":
            return self._reference(value, beside(schema, key, None, others))
        if key in ALTERNATIVES and isinstance(value, list):
            return self._branches(key, value, beside(schema, key, None, others))
        if key == "allOf" and isinstance(value, list):
            return [
                self._closed(part, beside(schema, key, index, others)) for index, part in enumerate(value)
            ]
        return value

    def _properties(self, schema: Schema, properties: Schema, others: Names) -> Schema:
        """A property that other schemas describe as well keeps its schema as it is. If each of them closed
        the property's value, no value might be left."""
        parts = [self._parts.names_of(part) for _, _, part in self._parts.of(schema)]
        shared = Names.of_all([others, *parts]).described
        return {
            name: self._original(part) if name in shared else self._closed(part, NOTHING)
            for name, part in properties.items()
        }

    def _reference(self, pointer: Any, others: Names) -> Any:
        target = self._parts.target(pointer)
        if target is None or others == NOTHING:
            return pointer  # the target is closed where it stands
        if (pointer, others) not in self._copies:
            name = self._copies[pointer, others] = self._new_name()
            self._definitions[name] = None  # its place, as it may refer to itself
            self._definitions[name] = self._closed(target, others)
        return f"#/$defs/{self._copies[pointer, others]}"

    def _branches(self, key: str, branches: list[Any], others: Names) -> Any:
        """oneOf stays as it is, open, where closed branches would no longer overlap. An example: {"a": 1}
        meets both branches of [{a}, {b}], so oneOf refuses it, and meets only the first branch once both are
        closed."""
        if key == "oneOf" and not self._parts.are_apart(branches, others):
            return [self._original(branch) for branch in branches]
        return [self._closed(branch, others) for branch in branches]

    def _original(self, schema: Any) -> Any:
        """A schema as it is; its references lead to what was not closed."""
        place = f"#/$defs/{self._name_of_original}"
        original = moved(schema, place)
        if original != schema and self._name_of_original not in self._definitions:
            self._definitions[self._name_of_original] = moved(self._root, place)
        return original

    def _new_name(self) -> str:
        """A name that no definition of the schema has."""
        taken = members(self._root, "$defs")
        return next(name for number in self._numbers if (name := f"closed.{number}") not in taken)


def _closing(schema: Schema, names: Names) -> Schema:
    """The keywords that let an object have these names and no others."""
    properties, patterns = members(schema, "properties"), members(schema, "patternProperties")
    keywords: Schema = {"properties": properties | {n: True for n in names.properties if n not in properties}}
    if names.patterns:
        keywords["patternProperties"] = patterns | {n: True for n in names.patterns if n not in patterns}
    return keywords | {"additionalProperties": False}
