"""SchemaParts: which schemas of a JSON schema hold for the same value, and what they say of it together.
Follows references (unlike schema_facts.py), and writes nothing (unlike closed_schema.py)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from penstock.generation.grammars.schema_facts import Facts, Names, Schema, items, members, own_names

#: Keywords with a list of schemas, of which a value needs to meet one.
ALTERNATIVES = ("anyOf", "oneOf")
#: Nothing is said of an object.
NOTHING = Names()
#: What is said of an object that may have any further properties.
OPEN = Names(is_open=True)
#: Stands for a definition that is not found.
_UNKNOWN: Schema = {"additionalProperties": True}
#: Schemas and names that are looked at or written. A schema of 1000 properties takes some 2000. A schema that
#: needs more than this was made to grow: each of n parts gets the names of all, and a definition may be
#: needed once for each set of names.
MAX_WRITTEN = 200_000


class Effort:
    """Counts what one schema costs, and refuses a schema that costs too much."""

    def __init__(self) -> None:
        self._num_written = 0

    def spend(self, amount: int) -> None:
        """Raises ValueError if the schema is too large."""
        self._num_written += amount
        if self._num_written > MAX_WRITTEN:
            raise ValueError(
                "its objects are joined of too many parts (allOf, anyOf, oneOf, $ref) to be closed; make it "
                "smaller, or say additionalProperties in each of them"
            )


class SchemaParts:
    """Reads one schema, the root, and the schemas in it."""

    def __init__(self, root: Schema, effort: Effort) -> None:
        self._root = root
        self._effort = effort
        #: Schema's id() -> what the schema and its parts name.
        self._names: dict[int, Names] = {}

    def target(self, pointer: Any) -> Schema | None:
        """What "#/a/b" points to. None if that is in another document, or if nothing is there."""
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

    def of(self, schema: Schema) -> Iterator[tuple[str, int, Any]]:
        """The parts of a schema: schemas in it that hold for the same value. Each comes with its keyword and
        its place there."""
        for key in ("allOf", *ALTERNATIVES):
            for index, part in enumerate(items(schema, key)):
                yield key, index, part
        if "$ref" in schema:
            yield "$ref", 0, self.target(schema["$ref"]) or _UNKNOWN

    def names_of(self, schema: Any) -> Names:
        """What a schema and its parts say of an object's properties."""
        if not isinstance(schema, dict):
            return NOTHING
        if id(schema) not in self._names:
            self._names[id(schema)] = NOTHING  # for a schema that leads to itself
            parts = [self.names_of(part) for _, _, part in self.of(schema)]
            names = self._names[id(schema)] = Names.of_all([own_names(schema), *parts])
            self._effort.spend(1 + len(names.properties))
        return self._names[id(schema)]

    def names_beside(self, schema: Schema, key: str, index: int | None, others: Names) -> Names:
        """What `others` and a schema say of an object, leaving out the parts under a keyword, or only the
        part at `index` there."""
        names = [others, own_names(schema)]
        for other_key, other_index, part in self.of(schema):
            if other_key != key or (index is not None and other_index != index):
                names.append(self.names_of(part))
        beside = Names.of_all(names)
        self._effort.spend(len(names) + len(beside.properties))
        return OPEN if beside.is_open else beside

    def are_apart(self, branches: list[Any], others: Names) -> bool:
        """Whether closed branches (each with its own names and `others`) admit the same values as open ones
        do under oneOf: no value that two open branches admit may be left to one alone."""
        facts = [Facts.of(list(self._joined(branch))) for branch in branches]
        names = [self.names_of(branch) | others for branch in branches]
        for (one, its_names), (other, other_names) in combinations(zip(facts, names, strict=True), 2):
            self._effort.spend(1 + (len(one.required) + len(other.required)) // 10)
            if one.excludes(other):
                continue
            if not (one.asks_more_than(other_names) and other.asks_more_than(its_names)):
                return False
        return True

    def _joined(self, schema: Any, seen: frozenset[int] = frozenset()) -> Iterator[Schema]:
        """A schema, and the others that hold wherever the schema does."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return
        self._effort.spend(1 + len(members(schema, "properties")))
        yield schema
        for key, _, part in self.of(schema):
            if key not in ALTERNATIVES:
                yield from self._joined(part, seen | {id(schema)})
