"""Grammars of calls, made of the functions' JSON Schemas: one grammar for all calls of an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock import Grammar
from penstock_server.protocol.tools import Function
from penstock_server.tools.parsers import TOOL_CALL, TOOL_CALL_END

#: The most calls of a forced list: small models would go on without end.
MAX_CALLS = 16

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def arguments_schema(function: Function) -> dict[str, Any]:
    """The schema of a function's arguments, which is that of an object."""
    return _NO_ARGUMENTS if function.parameters is None else {"type": "object"} | function.parameters


def arguments_grammar(function: Function) -> Grammar:
    """The grammar of a function's arguments. Raises InvalidParameter for a wrong schema."""
    return Grammar.json_schema(arguments_schema(function))


def calls_grammar(functions: Sequence[Function], is_list: bool) -> Grammar:
    """One call {"name": ..., "parameters": ...} of a function among `functions`, or a list of 1 to MAX_CALLS
    calls."""
    definitions: dict[str, Any] = {}
    calls = []
    for function in functions:
        key = f"{function.name}.parameters"  # no other function has a name with a dot
        definitions[key] = Grammar.part_of_schema(arguments_schema(function), f"#/$defs/{key}")
        properties = {"name": {"const": function.name}, "parameters": {"$ref": f"#/$defs/{key}"}}
        call = {"type": "object", "properties": properties, "additionalProperties": False}
        calls.append(call | {"required": ["name", "parameters"]})
    one = {"anyOf": calls}
    schema = {"type": "array", "minItems": 1, "maxItems": MAX_CALLS, "items": one} if is_list else one
    return Grammar.json_schema(schema | {"$defs": definitions})


def tagged_calls_grammar(functions: Sequence[Function], is_list: bool) -> Grammar:
    """Any text, in which <tool_call> begins a call of one of the functions, in Hermes' format. The arguments
    of a function that is not `strict` may be any object. Without `is_list` the first call ends the answer."""
    start = "(trigger call)* TEXT" if is_list else "TEXT | trigger call"
    text = ["TEXT: /(.|\\n)*/", f"trigger[lazy]: TEXT {json.dumps(TOOL_CALL)}"]
    return Grammar.lark("\n".join([f"start: {start}", *text, *_call_rules(functions)]))


def calls_or_json_grammar(functions: Sequence[Function], is_list: bool, schema: str) -> Grammar:
    """Either calls in Hermes' format, as in tagged_calls_grammar(), or JSON that follows `schema`."""
    tag = json.dumps(TOOL_CALL)
    calls = f'{tag} call ("\\n" {tag} call)*' if is_list else f"{tag} call"
    rules = [f"start: {calls} | content", f"content: {_json(schema)}"]
    return Grammar.lark("\n".join([*rules, *_call_rules(functions)]))


def _call_rules(functions: Sequence[Function]) -> list[str]:
    """The rules of `call`, the part of a call after <tool_call>."""
    rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(functions)))}"]
    for index, function in enumerate(functions):
        schema = (arguments_grammar(function) if function.strict else Grammar.json_object()).text
        begin = json.dumps(f'\n{{"name": "{function.name}", "arguments": ')
        end = json.dumps(f"}}\n{TOOL_CALL_END}")
        rules.append(f"call_{index}: {begin} {_json(schema)} {end}")
    return rules


def _json(schema: str) -> str:
    """A JSON schema in Lark. White space is not allowed: a model could write it without end."""
    return f"%json {json.dumps({'x-guidance': {'whitespace_flexible': False}} | json.loads(schema))}"
