"""Calls of GLM-4.5, Qwen3-Coder, Seed-OSS and MiniMax-M2: inputs of vLLM's own tests, and a few more."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.server.tools.folding import Found, parse_in_pieces

from penstock_server.protocol.tools import Function
from penstock_server.tools.parsing.xml_calls import (
    GLM45,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
    XmlFormat,
    XmlParser,
)

TYPES = {
    "whole": {"type": "integer"},
    "part": {"type": "number"},
    "is_on": {"type": "boolean"},
    "text": {"type": "string"},
    "object": {"type": "object"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "maybe_text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "list": {"type": ["array", "null"]},
    "unit": {"enum": ["celsius", "fahrenheit"]},
    "named": {"$ref": "#/$defs/count"},
    "either": {"type": ["string", "integer", "object"]},
}
FUNCTIONS = [
    Function(
        name="types",
        parameters={"type": "object", "properties": TYPES, "$defs": {"count": {"type": "integer"}}},
    ),
    Function(name="get_weather", parameters={"type": "object", "properties": {"city": {"type": "string"}}}),
]


def read(form: XmlFormat, text: str) -> tuple[str, list[tuple[str, Any]]]:
    found: Found = parse_in_pieces(lambda: XmlParser(form, FUNCTIONS), text)
    return found.text, [(name, json.loads(arguments)) for name, arguments in found.named]


def glm(name: str, **values: str) -> str:
    members = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items()
    )
    return f"<tool_call>{name}\n{members}</tool_call>"


def qwen(name: str, **values: str) -> str:
    members = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{members}</function>\n</tool_call>"


def seed(name: str, **values: str) -> str:
    members = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in values.items())
    return f"<seed:tool_call>\n<function={name}>\n{members}</function>\n</seed:tool_call>"


def minimax(name: str, **values: str) -> str:
    return f"<minimax:tool_call>\n{invoke(name, **values)}</minimax:tool_call>"


def invoke(name: str, **values: str) -> str:
    members = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items())
    return f'<invoke name="{name}">\n{members}</invoke>\n'


FORMS = {
    "glm": (GLM45, glm),
    "qwen": (QWEN3_CODER, qwen),
    "seed": (SEED_OSS, seed),
    "minimax": (MINIMAX_M2, minimax),
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Any:
    return FORMS[request.param]


def test_calls_and_the_text_around_them(form: Any) -> None:
    format, write = form
    place = {"city": "Dallas", "state": "TX"}
    assert read(format, "This is a test") == ("This is a test", [])
    assert read(format, "") == ("", [])
    assert read(format, write("get_weather", **place)) == ("", [("get_weather", place)])
    two = write("get_weather", **place) + "\n" + write("get_time", zone="Asia/Tokyo")
    assert read(format, two) == ("", [("get_weather", place), ("get_time", {"zone": "Asia/Tokyo"})])
    before = "I'll help you. " + write("get_weather", city="北京")
    assert read(format, before) == ("I'll help you.", [("get_weather", {"city": "北京"})])
    between = f"One.\n\n{write('get_weather', city='a')}\n\nTwo.\n\n{write('get_weather', city='b')}"
    text, calls = read(format, between)
    assert text.split() == ["One.", "Two."] and [each["city"] for _, each in calls] == ["a", "b"]
    assert read(format, write("get_time")) == ("", [("get_time", {})])


def test_values_are_what_the_schema_says(form: Any) -> None:
    format, write = form
    written = {
        "whole": "42",
        "part": "3.14",
        "is_on": "true",
        "text": "123",
        "object": '{"key": [1, {"a": "b"}]}',
        "maybe": "5",
        "maybe_text": "null",
        "list": "[1, 2]",
        "unit": "celsius",
        "named": "7",
    }
    expected = {"whole": 42, "part": 3.14, "is_on": True, "text": "123", "object": {"key": [1, {"a": "b"}]}}
    expected |= {"maybe": 5, "maybe_text": None, "list": [1, 2], "unit": "celsius", "named": 7}
    assert read(format, write("types", **written)) == ("", [("types", expected)])
    wrong = {"whole": "about 5", "is_on": "True", "maybe": "None", "text": "a\n  b < c & d\n\ne"}
    expected = {"whole": "about 5", "is_on": True, "maybe": None, "text": "a\n  b < c & d\n\ne"}
    assert read(format, write("types", **wrong)) == ("", [("types", expected)])


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (GLM45, "<tool_call> is a tag"),
        (GLM45, "<tool_call>{}</tool_call>"),
        (QWEN3_CODER, "<tool_call>\n{}\n</tool_call>"),
        (QWEN3_CODER, "write <function=> or <function"),
        (MINIMAX_M2, "<minimax:tool_call>hello</minimax:tool_call>"),
        (MINIMAX_M2, "<minimax:tool_ca"),
        (QWEN3_CODER, "<tool_call>" + "x" * 400),
    ],
)
def test_what_looks_like_a_call_and_is_none_is_text(format: XmlFormat, text: str) -> None:
    assert read(format, text) == (text, [])


def test_a_call_that_is_cut_off_stays_open(form: Any) -> None:
    format, write = form
    whole = write("get_weather", city="Beijing", date="2025-08-01")
    cut = whole[: whole.index("2025") + 3]
    found = parse_in_pieces(lambda: XmlParser(format, FUNCTIONS), cut)
    assert found.named == [("get_weather", '{"city": "Beijing"')] and found.text == ""


@pytest.mark.parametrize(("form", "write"), [(QWEN3_CODER, qwen), (SEED_OSS, seed)])
def test_an_answer_that_is_cut_off_within_the_last_mark(form: XmlFormat, write: Any) -> None:
    text = write("get_weather", city="Paris")
    for length in range(text.index("</function>") + len("</function>"), len(text)):
        assert read(form, text[:length]) == ("", [("get_weather", {"city": "Paris"})])


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("42", 42),
        ("2 dollars", "2 dollars"),
        ('{"a": 1}', {"a": 1}),
        ("{a", "{a"),
        ("true", "true"),
        ("1.5", "1.5"),
        ("[1]", "[1]"),
    ],
)
def test_a_string_or_another_type(form: Any, written: str, value: Any) -> None:
    format, write = form
    assert read(format, write("types", either=written)) == ("", [("types", {"either": value})])


def test_lines_belong_to_values_of_seed() -> None:
    assert read(SEED_OSS, seed("types", text="a\n")) == ("", [("types", {"text": "a\n"})])
    assert read(QWEN3_CODER, qwen("types", text="a\n")) == ("", [("types", {"text": "a\n"})])


def test_models_forget_tags() -> None:
    bare = qwen("get_weather", city="Dallas").removeprefix("<tool_call>\n").removesuffix("</tool_call>")
    assert read(QWEN3_CODER, bare) == ("", [("get_weather", {"city": "Dallas"})])
    unclosed = (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nDallas\n<parameter=state>\nTX\n</function>"
    )
    assert read(QWEN3_CODER, unclosed) == ("", [("get_weather", {"city": "Dallas", "state": "TX"})])
    assert read(GLM45, "<tool_call>get_time</tool_call>") == ("", [("get_time", {})])
    tight = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"
    assert read(GLM45, tight) == ("", [("get_weather", {"city": "Rome"})])


def test_many_calls_in_one_block_of_minimax() -> None:
    block = f"<minimax:tool_call>{invoke('a', x='1')}{invoke('b', y='2')}</minimax:tool_call>"
    assert read(MINIMAX_M2, block) == ("", [("a", {"x": "1"}), ("b", {"y": "2"})])
    plain = "<minimax:tool_call><invoke name=a><parameter name=x>1</parameter></invoke></minimax:tool_call>"
    assert read(MINIMAX_M2, plain) == ("", [("a", {"x": "1"})])
