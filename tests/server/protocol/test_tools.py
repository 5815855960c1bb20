"""What clients may send about tools, type by type; test_answering.py has what is refused, by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from penstock_server.protocol.tools import MAX_DEPTH, Function, Tool, ToolCall, ToolChoice, is_too_deep


def nested(depth: int) -> Any:
    """`depth` levels below the outermost."""
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def test_depth() -> None:
    assert not is_too_deep(1) and not is_too_deep({}) and not is_too_deep("x" * 500)
    assert not is_too_deep(nested(MAX_DEPTH))
    assert is_too_deep(nested(MAX_DEPTH + 1)) and is_too_deep(nested(900))


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"type": "object", "properties": {"a": True, "b": {"type": ["string", "null"]}}, "required": []},
        {"$defs": {"a": {}}, "allOf": [{"$ref": "#/$defs/a"}], "description": "…"},
        {"properties": {"a": {"not": {"const": 1}}}},
    ],
)
def test_schemas_that_nobody_has_to_enforce_are_taken(parameters: Any) -> None:
    Tool.model_validate({"type": "function", "function": {"name": "f-1_A", "parameters": parameters}})


def test_null_is_no_list_and_no_map() -> None:
    parameters = {"type": "object", "properties": None, "required": None, "$defs": None, "description": None}
    function = Function.model_validate({"name": "mcp__" + "f" * 123, "parameters": parameters})
    assert function.parameters == {"type": "object", "description": None}


@pytest.mark.parametrize("parameters", [{"type": "string"}, {"x": float("inf")}, {"x": "\ud800"}, [], "x"])
def test_schemas_that_are_none(parameters: Any) -> None:
    with pytest.raises(ValidationError):
        Function.model_validate({"name": "f", "parameters": parameters})


@pytest.mark.parametrize(
    "choice",
    [
        "none",
        "auto",
        "required",
        {"type": "function", "function": {"name": "f"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
        },
    ],
)
def test_choices(choice: Any) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(ToolChoice)
    taken = adapter.validate_python(choice)
    assert (taken if isinstance(choice, str) else taken.model_dump()) == choice


def test_what_client_libraries_leave_in_calls_is_taken() -> None:
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}}
    call = ToolCall.model_validate({"index": 0, "id": "1", "function": function})
    assert call.type == "function"
    with pytest.raises(ValidationError):
        ToolCall.model_validate({"id": "", "function": function})
