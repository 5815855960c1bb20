"""JSON Schemas and tools in the form that the server reads. Pure.

A schema is a dict of JSON Schema, or a pydantic model: any class with `model_json_schema`. This package does
not need pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast, runtime_checkable

from penstock_client.exchange import JSONObject
from penstock_client.results import ToolCall

# The types of formats. None of them is a type of JSON Schema, so that a format can't be taken for a schema.
_FORMATS = ("text", "json_object", "json_schema")


@runtime_checkable
class HasSchema(Protocol):
    """A pydantic model: the class, not an instance."""

    def model_json_schema(self) -> dict[str, Any]: ...


Schema = Mapping[str, Any] | HasSchema


def json_schema(schema: Schema, name: str | None = None) -> JSONObject:
    """The response_format for answers that follow `schema`.

    >>> json_schema({"type": "integer"}, name="age")
    {'type': 'json_schema', 'json_schema': {'name': 'age', 'schema': {'type': 'integer'}, 'strict': True}}
    """
    title = name or getattr(schema, "__name__", None) or "answer"
    named = {"name": title, "schema": schema_dict(schema), "strict": True}
    return {"type": "json_schema", "json_schema": named}


def function_tool(
    name: str, description: str, parameters: Schema | None = None, *, strict: bool | None = None
) -> JSONObject:
    """An element of `tools`: a function that the model may call.

    parameters: the schema of the function's arguments, an object; None if it has none. strict: the
    model's calls always follow the schema.
    """
    function: JSONObject = {"name": name, "description": description}
    if parameters is not None:
        function["parameters"] = schema_dict(parameters)
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def tool_result(call: ToolCall, content: str) -> JSONObject:
    """The message with the result of a call. It follows the message with the call.

    >>> tool_result(ToolCall("call_1", "weather", "{}"), "sunny")
    {'role': 'tool', 'tool_call_id': 'call_1', 'content': 'sunny'}
    """
    return {"role": "tool", "tool_call_id": call.id, "content": content}


def schema_dict(schema: Schema) -> JSONObject:
    """A schema as a dict. Raises TypeError for a value that is no schema."""
    if isinstance(schema, Mapping):
        return dict(schema)
    if isinstance(schema, HasSchema):
        closed: JSONObject = _closed(schema.model_json_schema())
        return closed
    raise TypeError(f"a schema is a dict or a pydantic model, not {schema!r:.100}")


def _closed(schema: Any) -> Any:
    """The schema of a pydantic model without further fields: the model would ignore them anyway."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    is_model = schema.get("type") == "object" and "properties" in schema
    return {
        **({"additionalProperties": False} if is_model else {}),
        **{name: _closed(value) for name, value in schema.items()},
    }


def as_response_format(value: object) -> object:
    """A response_format as it is sent. A schema becomes a response_format; a format stays as it is."""
    is_format = isinstance(value, Mapping) and value.get("type") in _FORMATS
    return value if is_format else json_schema(cast(Schema, value))


def flat_format(value: object) -> object:
    """A response_format in the words of /v1/responses."""
    form = as_response_format(value)
    if not isinstance(form, Mapping) or "json_schema" not in form:
        return form
    return {"type": form["type"], **form["json_schema"]}


def flat_tool(tool: object) -> object:
    """A function of `tools`, or a tool_choice, in the words of /v1/responses."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
        return tool
    return {"type": "function", **tool["function"]}


def as_structured_outputs(value: object) -> object:
    """vLLM's structured_outputs as they are sent: `json` may be a pydantic model."""
    if not isinstance(value, Mapping):
        raise TypeError(f"structured_outputs must be a mapping, not {value!r:.100}")
    schema = value.get("json")
    return {**value, "json": schema_dict(schema)} if isinstance(schema, HasSchema) else dict(value)
