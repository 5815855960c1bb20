"""Closed schemas: objects get the properties that a JSON schema names and no others, unless it says more.

JSON Schema lets an object have any further property. A client who names three properties wants these three,
and a small model that may go on invents others until its token limit. `additionalProperties` and
`unevaluatedProperties` are the client's own word, which stays.

Several schemas may hold for one object: allOf, anyOf and oneOf, and $ref with others beside it. None of them
may forbid what another one names. So each is closed with the names of the others, and a definition that is
closed in two ways is there twice. What was closed admits a part of what the schema admits.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, count
from typing import Any
from urllib.parse import unquote

from penstock.generation.grammars.schema_facts import (
    MAPS,
    NAMING_KEYWORDS,
    Facts,
    Names,
    Schema,
    items,
    members,
    moved,
    own_names,
    types_of,
)

#: Keywords that hold a schema, or a list of them. Other keywords' values are data here: llguidance refuses
#: those that hold schemas too, such as `not`, which closing would turn into its opposite.
_VALUES = frozenset({"items", "prefixItems", "additionalItems", "additionalProperties"})
_ALTERNATIVES = ("anyOf", "oneOf")
#: Schemas and names that are written. A schema of 1000 properties takes some 2000; what needs more than this
#: was made to grow (each of n parts gets the names of all, and a definition may be needed once for each set).
MAX_WRITTEN = 200_000

_NOTHING = Names()
#: Of a place that stays open, whatever it names.
_OPEN = Names(is_open=True)
#: What stands for a definition that is not found.
_UNKNOWN: Schema = {"additionalProperties": True}


def closed(schema: Schema) -> Schema:
    """The schema, closed. What is no schema stays as it is. Raises ValueError for one that is too large, and
    RecursionError for one that nests too deeply."""
    return _Closer(schema).whole()


class _Closer:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._num_written = 0
        #: By the schema's id; a schema that is being looked at has none yet.
        self._names: dict[int, Names] = {}
        self._definitions: Schema = {}
        self._numbers = count()
        #: The new definition of what stands at a pointer, closed with others' names.
        self._copies: dict[tuple[str, Names], str] = {}
        #: Of the definition that is the whole schema as it was, where something refers to it.
        self._name_of_original = self._new_name()

    def whole(self) -> Schema:
        schema: Schema = self._closed(self._root, _NOTHING)
        if self._definitions:
            schema = schema | {"$defs": members(schema, "$defs") | self._definitions}
        return schema

    def _closed(self, schema: Any, others: Names) -> Any:
        """others: what other places say of the same object."""
        if isinstance(schema, list):
            return [self._closed(item, others) for item in schema]
        if not isinstance(schema, dict):
            return schema
        self._spend(1 + len(others.properties) + len(others.patterns))
        result = {key: self._keyword(schema, key, others) for key in schema}
        names = self._names_of(schema) | others
        if not names.is_naming or names.is_open or "object" not in types_of(schema):
            return result
        if NAMING_KEYWORDS.isdisjoint(schema) and next(self._parts(schema), None):
            return result  # its parts close the object
        return result | _closing(result, names)

    def _keyword(self, schema: Schema, key: str, others: Names) -> Any:
        value = schema[key]
        if key == "properties" and isinstance(value, dict):
            return self._properties(schema, value, others)
        if key in MAPS and isinstance(value, dict):
            return {name: self._closed(part, _NOTHING) for name, part in value.items()}
        if key in _VALUES:
            return self._closed(value, _NOTHING)
        if key == "$ref":
            return self._reference(value, self._rest(schema, key, None, others))
        if key in _ALTERNATIVES and isinstance(value, list):
            return self._branches(key, value, self._rest(schema, key, None, others))
        if key == "allOf" and isinstance(value, list):
            return [
                self._closed(part, self._rest(schema, key, index, others)) for index, part in enumerate(value)
            ]
        return value

    def _properties(self, schema: Schema, properties: Schema, others: Names) -> Schema:
        """A value that other places describe as well stays as it is: closed by each of them, it could be
        none."""
        parts = [self._names_of(part) for _, _, part in self._parts(schema)]
        shared = Names.of_all([others, *parts]).described
        return {
            name: self._original(part) if name in shared else self._closed(part, _NOTHING)
            for name, part in properties.items()
        }

    def _rest(self, schema: Schema, key: str, index: int | None, others: Names) -> Names:
        """What is said of the object elsewhere than in the parts under a keyword, or in one of them."""
        names = [others, own_names(schema)]
        for other_key, other_index, part in self._parts(schema):
            if other_key != key or (index is not None and other_index != index):
                names.append(self._names_of(part))
        rest = Names.of_all(names)
        self._spend(len(names) + len(rest.properties))
        return _OPEN if rest.is_open else rest

    def _names_of(self, schema: Any) -> Names:
        if not isinstance(schema, dict):
            return _NOTHING
        if id(schema) not in self._names:
            self._names[id(schema)] = _NOTHING  # of a schema that leads to itself
            parts = [self._names_of(part) for _, _, part in self._parts(schema)]
            names = self._names[id(schema)] = Names.of_all([own_names(schema), *parts])
            self._spend(1 + len(names.properties))
        return self._names[id(schema)]

    def _parts(self, schema: Schema) -> Iterator[tuple[str, int, Any]]:
        """The schemas in it that hold for the same value, each with its keyword and its place there."""
        for key in ("allOf", *_ALTERNATIVES):
            for index, part in enumerate(items(schema, key)):
                yield key, index, part
        if "$ref" in schema:
            yield "$ref", 0, self._target(schema["$ref"]) or _UNKNOWN

    # -- references -----------------------------------------------------------------------------

    def _reference(self, pointer: Any, others: Names) -> Any:
        target = self._target(pointer)
        if target is None or others == _NOTHING:
            return pointer  # it is closed where it stands
        if (pointer, others) not in self._copies:
            name = self._copies[pointer, others] = self._new_name()
            self._definitions[name] = None  # its place, as it may refer to itself
            self._definitions[name] = self._closed(target, others)
        return f"#/$defs/{self._copies[pointer, others]}"

    def _new_name(self) -> str:
        taken = members(self._root, "$defs")
        return next(name for number in self._numbers if (name := f"closed.{number}") not in taken)

    def _target(self, pointer: Any) -> Schema | None:
        """What "#/a/b" points to; None: it is elsewhere, or nothing is there."""
        if not isinstance(pointer, str) or not (pointer + "/").startswith("#/"):
            return None
        found: Any = self._root
        for step in pointer.split("/")[1:]:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and step.isdecimal():
                found = dict(enumerate(found)).get(int(step))
            else:
                found = found.get(step) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else None

    # -- alternatives ---------------------------------------------------------------------------

    def _branches(self, key: str, branches: list[Any], others: Names) -> Any:
        """oneOf stays as it is, open, where closing would part what overlaps: {"a": 1} is of one kind by
        [{a}, {b}] closed, and of two kinds by the schema, which so refuses it."""
        if key == "oneOf" and not self._are_apart(branches, others):
            return [self._original(branch) for branch in branches]
        return [self._closed(branch, others) for branch in branches]

    def _are_apart(self, branches: list[Any], others: Names) -> bool:
        facts = [Facts.of(list(self._joined(branch))) for branch in branches]
        names = [self._names_of(branch) | others for branch in branches]
        for (one, its_names), (other, other_names) in combinations(zip(facts, names, strict=True), 2):
            self._spend(1 + (len(one.required) + len(other.required)) // 10)
            if one.excludes(other):
                continue
            if not (one.asks_more_than(other_names) and other.asks_more_than(its_names)):
                return False
        return True

    def _joined(self, schema: Any, seen: frozenset[int] = frozenset()) -> Iterator[Schema]:
        """A schema, and the others that hold wherever it does."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return
        self._spend(1 + len(members(schema, "properties")))
        yield schema
        for key, _, part in self._parts(schema):
            if key not in _ALTERNATIVES:
                yield from self._joined(part, seen | {id(schema)})

    def _original(self, schema: Any) -> Any:
        """As it is, with references to what was not closed."""
        place = f"#/$defs/{self._name_of_original}"
        original = moved(schema, place)
        if original != schema and self._name_of_original not in self._definitions:
            self._definitions[self._name_of_original] = moved(self._root, place)
        return original

    def _spend(self, amount: int) -> None:
        self._num_written += amount
        if self._num_written > MAX_WRITTEN:
            raise ValueError(
                "its objects are joined of too many parts (allOf, anyOf, oneOf, $ref) to be closed; make it "
                "smaller, or say additionalProperties in each of them"
            )


def _closing(schema: Schema, names: Names) -> Schema:
    """The keywords that let an object have these names and no others."""
    properties, patterns = members(schema, "properties"), members(schema, "patternProperties")
    keywords: Schema = {"properties": properties | {n: True for n in names.properties if n not in properties}}
    if names.patterns:
        keywords["patternProperties"] = patterns | {n: True for n in names.patterns if n not in patterns}
    return keywords | {"additionalProperties": False}
