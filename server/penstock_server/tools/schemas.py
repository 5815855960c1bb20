"""What calls must look like, as grammars. JSON Schema in, one schema for all the calls of an answer out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from penstock import Grammar
from penstock_server.protocol.tools import Function
from penstock_server.tools.parsers import TOOL_CALL, TOOL_CALL_END

#: Of a forced list: small models go on and on.
MAX_CALLS = 16

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
#: Keywords whose values are data and no schemas, and those whose values hold schemas by name.
_DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples"})
_MAP_KEYWORDS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
#: Where one of these is, an object's own properties are not all that it may have.
_OPEN_KEYWORDS = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
_JOINING_KEYWORDS = frozenset({"$ref", "$dynamicRef", "anyOf", "oneOf", "if", "not", "dependentSchemas"})


def arguments_schema(function: Function) -> dict[str, Any]:
    """Of an object. Objects have the properties that are named and no others, unless something is said of
    others: JSON Schema would allow any, but a function has no use for them, and small models never stop."""
    if function.parameters is None:
        return _NO_ARGUMENTS
    schema = {"type": "object"} | function.parameters
    closed: dict[str, Any] = schema if _is_joined(schema) else _mapped(schema, _closed)
    return closed


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
    arguments of those that are not `strict` may be any object. Without `is_list` the first call ends it."""
    start = "(trigger call)* TEXT" if is_list else "TEXT | trigger call"
    text = ["TEXT: /(.|\\n)*/", f"trigger[lazy]: TEXT {json.dumps(TOOL_CALL)}"]
    return Grammar.lark("\n".join([f"start: {start}", *text, *_call_rules(functions)]))


def calls_or_json_grammar(functions: Sequence[Function], is_list: bool, schema: str) -> Grammar:
    """Either calls in Hermes' format, as above, or JSON of a schema, which is text."""
    tag = json.dumps(TOOL_CALL)
    calls = f'{tag} call ("\\n" {tag} call)*' if is_list else f"{tag} call"
    rules = [f"start: {calls} | content", f"content: {_json(json.loads(schema))}"]
    return Grammar.lark("\n".join([*rules, *_call_rules(functions)]))


def _call_rules(functions: Sequence[Function]) -> list[str]:
    """`call` is what follows <tool_call>."""
    rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(functions)))}"]
    for index, function in enumerate(functions):
        schema = arguments_schema(function) if function.strict else {"type": "object"}
        begin = json.dumps(f'\n{{"name": "{function.name}", "arguments": ')
        end = json.dumps(f"}}\n{TOOL_CALL_END}")
        rules.append(f"call_{index}: {begin} {_json(schema)} {end}")
    return rules


def _json(schema: Any) -> str:
    """In Lark; without white space, of which a model could write without end."""
    if isinstance(schema, dict):
        schema = {"x-guidance": {"whitespace_flexible": False}} | schema
    return f"%json {json.dumps(schema)}"


def _moved(schema: dict[str, Any], place: str) -> Any:
    """A schema that was a whole, as a part at `place` of another: references within it begin there."""

    def move(part: dict[str, Any]) -> dict[str, Any]:
        reference = part.get("$ref")
        is_within = isinstance(reference, str) and reference.startswith("#")
        return part | {"$ref": place + str(reference)[1:]} if is_within else part

    return _mapped(schema, move)


def _is_joined(schema: dict[str, Any]) -> bool:
    """Whether an object's properties are named in several places, none of which may forbid the others'."""
    parts: list[dict[str, Any]] = []

    def note(part: dict[str, Any]) -> dict[str, Any]:
        parts.append(part)
        return part

    _mapped(schema, note)
    return any(
        "allOf" in part or ("properties" in part and not _JOINING_KEYWORDS.isdisjoint(part)) for part in parts
    )


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    if "properties" not in schema or not _OPEN_KEYWORDS.isdisjoint(schema):
        return schema
    return schema | {"additionalProperties": False}


def _mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """With each schema within it changed, the innermost first."""
    if isinstance(schema, list):
        return [_mapped(item, change) for item in schema]
    if not isinstance(schema, dict):
        return schema
    mapped = {}
    for key, value in schema.items():
        if key in _MAP_KEYWORDS and isinstance(value, dict):
            mapped[key] = {name: _mapped(part, change) for name, part in value.items()}
        else:
            mapped[key] = value if key in _DATA_KEYWORDS else _mapped(value, change)
    return change(mapped)
