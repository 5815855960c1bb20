"""Grammar: what an answer must be, as a value. Knows no tokenizer; grammar_matcher.py follows one."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.errors import InvalidParameter
from penstock.generation.grammars.closed_schema import closed
from penstock.generation.grammars.schema_facts import moved

#: What is larger is no honest request; grammar_trial.py has the limits on what it takes to read one.
MAX_GRAMMAR_CHARS = 250_000


@dataclass(frozen=True)
class Grammar:
    """A set of texts, of which the answer will be one, whole.

    Answers that are asked for with the same object share what it takes to follow it: see
    GrammarCompiler.matcher(). Made by the constructors below. They raise InvalidParameter for what can be
    seen without a model; Engine.validate() for the rest.
    """

    kind: Literal["json_schema", "regex", "choice", "lark"]
    #: The schema as JSON, the regular expression, the choices as a JSON list, or the Lark grammar.
    text: str

    def __post_init__(self) -> None:
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise invalid(
                f"the grammar has {len(self.text)} characters; at most {MAX_GRAMMAR_CHARS} are taken"
            )
        try:
            self.text.encode()
        except UnicodeEncodeError:
            raise invalid("the grammar has a character that is no Unicode") from None

    @staticmethod
    def part_of_schema(schema: dict[str, Any], place: str) -> Any:
        """A JSON Schema that was whole, as a part at `place` ("#/$defs/a") of another one: its references
        lead to the same things."""
        return moved(schema, place)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | bool | str, *, is_closed: bool = True) -> Grammar:
        """JSON that a schema (draft 2020-12) admits, its properties in the schema's order.

        Objects have the properties that the schema names, and others only where it says so with
        additionalProperties (closed_schema.py); without is_closed others are admitted wherever JSON Schema
        does. {"type": "object"}, which names none, is any object.

        There is no white space between its parts, unless the schema's top level has "x-guidance":
        {"whitespace_flexible": true}; llguidance's docs/json_schema.md lists what else may stand there, and
        the keywords that it knows. The others are refused.
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise invalid(f"the JSON schema is no JSON: {error}") from None
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise invalid("the JSON schema is no object; it must be one, or true for any JSON")
        if not isinstance(schema.get("x-guidance", {}), dict):
            raise invalid("x-guidance in the JSON schema is no object")
        try:
            schema = closed(schema) if is_closed else schema
        except RecursionError:
            raise invalid("the JSON schema is nested too deeply") from None
        except ValueError as error:
            raise invalid(f"the JSON schema can't be used: {error}") from None
        try:
            return cls("json_schema", json.dumps(schema, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise invalid(f"the JSON schema can't be written as JSON: {error}") from None

    @classmethod
    def regex(cls, text: str) -> Grammar:
        """What a regular expression in Rust's syntax, without look-around, matches from beginning to end. The
        characters of \\d, \\w and \\s are ASCII's, as nobody wants the digits of all scripts."""
        return cls("regex", text)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """One of some texts, letter by letter."""
        if not choices or not all(isinstance(text, str) and text for text in choices):
            raise invalid("a choice needs at least one text, and none may be empty")
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """A context-free grammar in llguidance's variant of Lark (docs/syntax.md there), from `start` on. A
        temperature in it has no effect. One in GBNF, whose rules have ::=, is rewritten."""
        if not re.search(r"^\s*[\w-]+\s*::=", text, re.MULTILINE):
            return cls("lark", text)
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            return cls("lark", any_to_lark(text))
        except Exception as error:  # the package has no type for all of them
            raise invalid(f"the GBNF grammar can't be read: {error}") from None


def invalid(message: str) -> InvalidParameter:
    return InvalidParameter("grammar", message)
