"""Grammar: what an answer must be, as a value. Knows no tokenizer; grammar_matcher.py does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.errors import InvalidParameter
from penstock.generation.grammars.closed_schema import closed
from penstock.generation.grammars.gbnf import as_lark, is_gbnf
from penstock.generation.grammars.grammar_trial import MAX_OPTIONAL
from penstock.generation.grammars.schema_facts import moved
from penstock.generation.grammars.schema_numbers import exact_numbers

#: No honest request needs a larger grammar. grammar_trial.py limits the time and memory to read a grammar.
MAX_GRAMMAR_CHARS = 250_000


@dataclass(frozen=True)
class Grammar:
    """A set of texts. The answer will be one of them, whole.

    Answers to requests with the same Grammar object share the compiled grammar: see
    GrammarCompiler.matcher(). The constructors below make grammars. They raise InvalidParameter for errors
    that can be seen without a model; Engine.validate() raises it for the others.
    """

    kind: Literal["json_schema", "regex", "choice", "lark"]
    #: The schema as JSON, the regular expression, the choices as a JSON list, or the Lark grammar.
    text: str

    def __post_init__(self) -> None:
        _check_size(self.text)
        try:
            self.text.encode()
        except UnicodeEncodeError:
            raise invalid("the grammar has half a surrogate pair, which is no character; remove it") from None

    @staticmethod
    def part_of_schema(schema: dict[str, Any], place: str) -> Any:
        """A whole JSON Schema, changed into a part at `place` ("#/$defs/a") of another schema: its references
        lead to the same things."""
        return moved(schema, place)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | bool | str, *, is_closed: bool = True) -> Grammar:
        """JSON that a schema (draft 2020-12) admits, its properties in the schema's order.

        Objects have the properties that the schema names. They have other properties only where the schema
        says so with additionalProperties (closed_schema.py). Without is_closed, other properties are admitted
        wherever JSON Schema admits them. {"type": "object"} names no properties and is any object.

        The JSON has no white space between its parts, unless the schema's top level has "x-guidance":
        {"whitespace_flexible": true}. llguidance's docs/json_schema.md lists the other settings of
        x-guidance, and the keywords that llguidance knows. Other keywords are refused.
        """
        if isinstance(schema, str):
            _check_size(schema)
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise invalid(f"the JSON schema is not JSON: {error}") from None
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise invalid("the JSON schema is not an object; it must be an object, or true for any JSON")
        if not isinstance(schema.get("x-guidance", {}), dict):
            raise invalid("x-guidance in the JSON schema is not an object; it must be an object")
        try:
            _check_optional(schema, "#")
            exact = exact_numbers(schema)
            schema = closed(exact) if is_closed else exact
        except RecursionError:
            raise invalid("the JSON schema is nested too deeply; use fewer levels") from None
        except ValueError as error:
            raise invalid(f"the JSON schema can't be used: {error}") from None
        try:
            return cls("json_schema", json.dumps(schema, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise invalid(f"the JSON schema can't be written as JSON: {error}") from None

    @classmethod
    def regex(cls, text: str) -> Grammar:
        """A text that a regular expression matches from beginning to end. The syntax is Rust's, without
        look-around. \\d, \\w and \\s match ASCII characters only, since hardly anybody wants the digits of
        all scripts."""
        return cls("regex", text)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """One of these texts, character by character."""
        if not choices or not all(isinstance(text, str) and text for text in choices):
            raise invalid("a choice needs at least one text, and none may be empty")
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """A context-free grammar in llguidance's variant of Lark (docs/syntax.md there); the rule `start`
        comes first. A temperature in the grammar has no effect. A grammar in GBNF, whose rules have ::=, is
        rewritten in Lark."""
        _check_size(text)
        if not is_gbnf(text):
            return cls("lark", text)
        try:
            return cls("lark", as_lark(text))
        except Exception as error:  # the package's errors have no common type
            raise invalid(f"the GBNF grammar can't be read: {error}") from None


def _check_optional(schema: Any, place: str) -> None:
    """Raises ValueError for an object with more optional properties than a matcher can keep in sight: an
    answer would end with an error where such an object begins."""
    if isinstance(schema, list):
        for index, each in enumerate(schema):
            _check_optional(each, f"{place}/{index}")
    elif isinstance(schema, dict):
        named, required = schema.get("properties"), schema.get("required")
        if isinstance(named, dict) and len(named) > MAX_OPTIONAL:
            must = [each for each in required if isinstance(each, str)] if isinstance(required, list) else []
            if (number := len(named.keys() - set(must))) > MAX_OPTIONAL:
                raise ValueError(
                    f"the object at {place} has {number} optional properties, of which {MAX_OPTIONAL} are "
                    "taken; have fewer of them, or name some in `required`"
                )
        for name, each in schema.items():
            _check_optional(each, f"{place}/{name}")


def _check_size(text: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise invalid(f"the grammar has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are taken")


def invalid(message: str) -> InvalidParameter:
    return InvalidParameter("grammar", message)
