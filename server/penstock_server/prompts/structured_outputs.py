"""From response_format, structured_outputs, grammar or json_schema to a Grammar that the model can follow."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from penstock import Grammar
from penstock.errors import InvalidParameter
from penstock_server.facade.model import ServedModel
from penstock_server.protocol.errors import ApiError
from penstock_server.protocol.generation_fields import GenerationFields
from penstock_server.protocol.output_formats import (
    AnswerFormat,
    FlatSchemaFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    ResponseFormat,
    StructuredOutputs,
)


def read_grammar(model: ServedModel, body: GenerationFields) -> Grammar | None:
    """The grammar that a request demands; None if the answer may be any text. Don't call this function on the
    event loop: large grammars take long.

    Raises 400, with the field's name, for a grammar that is wrong, is too large, or can't be followed here.
    """
    field = next(
        (
            name
            for name in ("structured_outputs", "grammar", "json_schema")
            if getattr(body, name) is not None
        ),
        "response_format",
    )
    return _checked(model, field, lambda: _grammar(body))


def read_format(model: ServedModel, form: AnswerFormat | None, field: str) -> Grammar | None:
    """The grammar of a request whose only field for a form is `field`. Raises as read_grammar()."""
    return _checked(model, field, lambda: _of_format(form))


def _checked(model: ServedModel, field: str, make: Callable[[], Grammar | None]) -> Grammar | None:
    try:
        grammar = make()
        if grammar is not None:
            model.check_grammar(grammar)
    except InvalidParameter as error:
        raise ApiError(400, f"{field}: {error}", code="invalid_value", param=field) from error
    return grammar


def _grammar(body: GenerationFields) -> Grammar | None:
    if body.structured_outputs is not None:
        return _structured(body.structured_outputs)
    if body.grammar is not None:
        return Grammar.lark(body.grammar)
    if body.json_schema is not None:
        return Grammar.json_schema(body.json_schema)
    return _of_format(body.response_format)


def _of_format(form: ResponseFormat | AnswerFormat | None) -> Grammar | None:
    match form:
        case (
            JsonObjectFormat(json_schema=schema)
            | JsonSchemaFormat(json_schema=NamedSchema(json_schema=schema))
            | FlatSchemaFormat(json_schema=schema)
        ):
            return Grammar.json_object() if schema is None else Grammar.json_schema(schema)
    return None


def _structured(outputs: StructuredOutputs) -> Grammar:
    if outputs.regex is not None:
        return Grammar.regex(outputs.regex)
    if outputs.choice is not None:
        return Grammar.choice(outputs.choice)
    if outputs.grammar is not None:
        return Grammar.lark(outputs.grammar)
    if outputs.json_object:
        schema: dict[str, Any] = {"type": "object"}
    elif isinstance(outputs.json_schema, str):
        schema = json.loads(Grammar.json_schema(outputs.json_schema).text)
    else:
        schema = outputs.json_schema or {}
    is_closed = outputs.disable_additional_properties is not False
    return Grammar.json_schema(with_options(schema, outputs), is_closed=is_closed)


def with_options(schema: dict[str, Any], outputs: StructuredOutputs) -> dict[str, Any]:
    """The schema, with vLLM's options moved into its "x-guidance". A value that stands there already wins."""
    options: dict[str, object] = {}
    if outputs.disable_any_whitespace is not None:
        options["whitespace_flexible"] = not outputs.disable_any_whitespace
    if outputs.whitespace_pattern is not None:
        options["whitespace_pattern"] = outputs.whitespace_pattern
    own = schema.get("x-guidance", {})
    if options and isinstance(own, dict):
        schema = schema | {"x-guidance": options | own}
    return schema
