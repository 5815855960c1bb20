"""The parts of requests about tools: definitions, the choice among them, calls in messages."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock_server.protocol.wire import Text, Wire

#: The most tools of a request, as at OpenAI.
MAX_TOOLS = 128
#: The same where the API has no such limit: several MCP servers together offer some hundred tools.
MAX_TOOLS_ELSEWHERE = 1024

#: The deepest nesting of schemas and of arguments. No honest request nests deeper, and walking deeper JSON
#: could overflow the stack.
MAX_DEPTH = 100

#: Keywords of JSON Schema that hold schemas by name.
_SCHEMA_MAPS = ("properties", "$defs", "definitions", "patternProperties")

#: Members that count as absent if they are null, as clients in Go write lists and maps without members.
_MAY_BE_NULL = frozenset({*_SCHEMA_MAPS, "required"})


def _invalid_schema(reason: str) -> PydanticCustomError:
    return PydanticCustomError(
        "invalid_schema", "{message}", {"message": f"is no JSON Schema of arguments: {reason}"}
    )


def is_too_deep(value: object) -> bool:
    """Whether JSON nests deeper than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [item for outer in level for item in _items(outer)]
    return bool(level)


def _items(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Checks those parts of a schema that every model and template relies on. Whether a grammar can enforce
    the schema is checked later, and only for calls that a grammar binds."""
    schema = {key: value for key, value in schema.items() if value is not None or key not in _MAY_BE_NULL}
    if is_too_deep(schema):
        raise _invalid_schema(f"the schema nests deeper than {MAX_DEPTH} levels")
    try:
        json.dumps(schema, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise _invalid_schema(str(error)) from None
    if schema.get("type", "object") != "object":
        raise _invalid_schema(f"the type is {schema['type']!r}; it must be 'object'")
    for keyword in _SCHEMA_MAPS:
        _check_map(keyword, schema.get(keyword, {}))
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _invalid_schema("'required' must be a list of names")
    return schema


def _check_map(keyword: str, schemas: object) -> None:
    if not isinstance(schemas, dict):
        raise _invalid_schema(f"{keyword!r} must be an object")
    for name, schema in schemas.items():
        if not isinstance(schema, dict | bool):
            raise _invalid_schema(f"{keyword}.{name} must be an object")


#: As Anthropic and OpenAI's Responses have it: names of MCP tools have their server's name in front.
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


class Function(Wire):
    name: FunctionName
    description: Text | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(check_schema)] | None = Field(
        None, description="JSON Schema of the arguments; null: the function has none."
    )
    strict: bool | None = Field(None, description="With tool_choice auto: calls must follow the schema.")


def _check_type(value: object) -> object:
    if value != "function":
        kind = f"the type {value!r}" if isinstance(value, str) else "this type"
        message = f"tools of {kind} are not supported by this server, only functions"
        raise PydanticCustomError("unsupported_parameter", "{message}", {"message": message})
    return value


FunctionType = Annotated[Literal["function"], BeforeValidator(_check_type)]


class _Type(Wire):
    type: FunctionType


class TypedTool(Wire):
    """A tool whose type is checked before its other members: for a tool that is no function, the error names
    the type, and not members that are missing."""

    @model_validator(mode="before")
    @classmethod
    def _check_type_first(cls, value: object) -> object:
        if isinstance(value, dict) and "type" in value:
            _Type.model_validate({"type": value["type"]})
        return value


class Tool(TypedTool):
    type: FunctionType
    function: Function
    cache_control: dict[str, Any] | None = Field(None, description="Without effect; Anthropic's hint.")


class FunctionRef(Wire):
    name: FunctionName


class ToolRef(Wire):
    """A tool by its name. As `tool_choice`, the model must call this tool."""

    type: FunctionType
    function: FunctionRef


class AllowedTools(Wire):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolRef], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolChoice(Wire):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def kind_of_choice(value: object) -> str:
    """The tag of a tool_choice."""
    if isinstance(value, str):
        return "mode"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "allowed_tools" if kind == "allowed_tools" else "function"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[AllowedToolChoice, Tag("allowed_tools")]
    | Annotated[ToolRef, Tag("function")],
    Discriminator(kind_of_choice),
]


class CalledFunction(Wire):
    name: Annotated[Text, Field(min_length=1)]
    #: A JSON object, as text.
    arguments: Text
    parsed_arguments: Any = Field(None, description="Without effect; the openai package adds it.")


class ToolCall(Wire):
    """A call that an earlier answer made."""

    id: Annotated[Text, Field(min_length=1)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="Without effect; a stream's deltas have it.")


def _refuse_deprecated(value: object) -> None:
    if value not in (None, [], {}, "none", "auto"):
        message = "deprecated by OpenAI and not supported; send tools, tool_choice and tool_calls instead"
        raise PydanticCustomError("unsupported_parameter", message)


#: A field that OpenAI replaced by tools. Only values without a meaning are accepted.
Deprecated = Annotated[None, PlainValidator(_refuse_deprecated), WithJsonSchema({"type": "null"})]
