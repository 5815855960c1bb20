import doctest

import pydantic
import pytest

from penstock_client import schemas
from penstock_client.results import ToolCall
from penstock_client.schemas import (
    as_response_format,
    as_structured_outputs,
    function_tool,
    json_schema,
    schema_dict,
    tool_result,
)

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Place(pydantic.BaseModel):
    city: str


PLACE = {**Place.model_json_schema(), "additionalProperties": False}


def test_a_model_is_named_by_its_class():
    named = json_schema(Place)["json_schema"]
    assert (named["name"], named["schema"]) == ("Place", PLACE)
    assert json_schema(Place, name="spot")["json_schema"]["name"] == "spot"
    assert json_schema(SCHEMA)["json_schema"]["name"] == "answer"


def test_models_have_no_other_fields():
    class Trip(pydantic.BaseModel):
        type: str
        places: list[Place]
        notes: dict[str, int]
        properties: int = 1

    class Open(pydantic.BaseModel, extra="allow"):
        city: str

    schema = schema_dict(Trip)
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Place"]["additionalProperties"] is False
    del schema["additionalProperties"], schema["$defs"]["Place"]["additionalProperties"]
    assert schema == Trip.model_json_schema()
    assert schema_dict(Open) == Open.model_json_schema()
    assert schema_dict(SCHEMA) == SCHEMA


@pytest.mark.parametrize("value", [SCHEMA, Place])
def test_a_schema_becomes_a_response_format(value):
    assert as_response_format(value) == json_schema(value)


@pytest.mark.parametrize("value", [{"type": "json_object"}, {"type": "text"}, json_schema(SCHEMA)])
def test_a_response_format_stays_what_it_is(value):
    assert as_response_format(value) is value


def test_structured_outputs():
    assert as_structured_outputs({"json": Place}) == {"json": PLACE}
    for value in ({"regex": "a+"}, {"choice": ["a", "b"]}, {"json": SCHEMA}, {"json": "{}"}):
        assert as_structured_outputs(value) == value


@pytest.mark.parametrize("convert", [as_response_format, schema_dict, json_schema, as_structured_outputs])
@pytest.mark.parametrize("value", ["object", 7, int])
def test_what_is_no_schema_is_refused(convert, value):
    with pytest.raises(TypeError):
        convert(value)


def test_tools():
    function = {"name": "weather", "description": "of a city"}
    assert function_tool("weather", "of a city") == {"type": "function", "function": function}
    tool = function_tool("weather", "of a city", Place, strict=True)
    assert tool["function"] == {**function, "parameters": PLACE, "strict": True}


def test_results_of_tools_name_their_call():
    assert tool_result(ToolCall("call_7", "weather", "{}"), "sunny")["tool_call_id"] == "call_7"


def test_examples_in_the_docstrings():
    result = doctest.testmod(schemas)
    assert result.attempted and not result.failed
