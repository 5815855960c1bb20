"""What calls must look like, as grammars. JSON Schema in, one schema for all the calls of an answer out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.generation.grammar import Grammar
from penstock_server.tools.request import Function

#: Of a forced list: small models go on and on.
MAX_CALLS = 16

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
#: Keywords whose values are data and no schemas.
_DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples"})


def arguments_schema(function: Function) -> dict[str, Any]:
    """Of an object, whatever the function's own schema leaves open."""
    if function.parameters is None:
        return _NO_ARGUMENTS
    return {"type": "object"} | function.parameters


def arguments_grammar(function: Function) -> Grammar:
    """Raises InvalidParameter for a schema that is none."""
    return Grammar.json_schema(arguments_schema(function))


def calls_grammar(functions: Sequence[Function], is_list: bool) -> Grammar:
    """{"name": ..., "parameters": ...} of one of the functions, or a list of 1 to MAX_CALLS."""
    definitions: dict[str, Any] = {}
    calls = []
    for function in functions:
        key = f"{function.name}.parameters"  # no other function has a name with a dot
        definitions[key] = _moved(arguments_schema(function), f"#/$defs/{key}")
        properties = {"name": {"const": function.name}, "parameters": {"$ref": f"#/$defs/{key}"}}
        call = {"type": "object", "properties": properties, "additionalProperties": False}
        calls.append(call | {"required": ["name", "parameters"]})
    one = {"anyOf": calls}
    schema = {"type": "array", "minItems": 1, "maxItems": MAX_CALLS, "items": one} if is_list else one
    return Grammar.json_schema(schema | {"$defs": definitions})


def tagged_calls_grammar(functions: Sequence[Function], is_list: bool) -> Grammar:
    """Any text, in which <tool_call> begins a call of one of the functions as Hermes' models write it. The
    arguments of those that are not `strict` may be any object."""
    rules = ["TEXT: /(.|\\n)*/", "trigger[lazy]: TEXT " + json.dumps("<tool_call>")]
    for index, function in enumerate(functions):
        schema = arguments_schema(function) if function.strict else {"type": "object"}
        begin = json.dumps(f'\n{{"name": "{function.name}", "arguments": ')
        end = json.dumps("}\n</tool_call>")
        rules.append(f"call_{index}: {begin} %json {json.dumps(schema)} {end}")
    call = " | ".join(f"call_{index}" for index in range(len(functions)))
    return Grammar.lark("\n".join([f"start: (trigger ({call})){'*' if is_list else '?'} TEXT", *rules]))


def _moved(schema: Any, place: str) -> Any:
    """A schema that was a whole, as a part at `place` of another: references within it begin there."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = place + value[1:]
        else:
            moved[key] = value if key in _DATA_KEYWORDS else _moved(value, place)
    return moved
