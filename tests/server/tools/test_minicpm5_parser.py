"""MiniCPM5's XML as models write it; the function's schema says what a text stands for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_server.protocol.tools import Function
from penstock_server.tools.minicpm5_parser import MiniCPM5Parser
from penstock_server.tools.reading import TextPiece

from .folding import Found, parse

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"}, "days": {"type": "integer"}, "is_dry": {"type": "boolean"},
    "stops": {"type": "array"}, "note": {"type": ["string", "null"]}, "any": {}, "odd": True,
}  # fmt: skip
WEATHER = Function.model_validate(
    {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}
)
BOOK = Function.model_validate(
    {"name": "book", "parameters": {"properties": {"seat": {}, "day": {}}, "required": ["seat"]}}
)
FUNCTIONS = [WEATHER, Function.model_validate({"name": "now"}), BOOK]
PARIS = '<function name="weather"><param name="city">Paris</param></function>'
NOW = '<function name="now"></function>'


def found(*pieces: str) -> Found:
    return parse(MiniCPM5Parser(FUNCTIONS), pieces)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello <b>you</b>", "Hello <b>you</b>", []),
        (PARIS, "", [("weather", {"city": "Paris"})]),
        (f"Let me see.\n{PARIS}\n{NOW}\n", "Let me see.", [("weather", {"city": "Paris"}), ("now", {})]),
        (f"{PARIS}\nDone.", "\nDone.", [("weather", {"city": "Paris"})]),
        (PARIS.replace('"', "'"), "", [("weather", {"city": "Paris"})]),
        (PARIS.replace(">", ">\n  "), "", [("weather", {"city": "Paris"})]),
        (PARIS.removesuffix("</function>"), "", [("weather", {"city": "Paris"})]),
        (PARIS.replace("</param>", ""), "", [("weather", {"city": "Paris"})]),
        (PARIS.replace("</param>", "</param>, and"), "", [("weather", {"city": "Paris"})]),
    ],
)
def test_calls(text: str, content: str, calls: list[Any]) -> None:
    result = found(text)
    named = [(name, json.loads(arguments)) for name, arguments in result.named]
    assert (result.text, named) == (content, calls)


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ({"city": "Paris", "other": "1"}, {"city": "Paris"}),
        ({"other": "1"}, {}),
        ({"arguments": '{"city": "Paris", "days": 2}'}, {"city": "Paris", "days": 2}),
        ({"properties": "{'city': 'Paris', 'other': None}"}, {"city": "Paris"}),
        ({"arguments": "Paris"}, {}),
        ({"arguments": '{"city": ' + "[" * 10_000}, {}),
        ({"arguments": "{'city': b'Paris'}"}, {}),
    ],
)
def test_arguments_are_what_the_function_takes(parameters: dict[str, str], arguments: dict[str, Any]) -> None:
    told = "".join(f'<param name="{name}">{text}</param>' for name, text in parameters.items())
    (call,) = found(f'<function name="weather">{told}</function>').named
    assert json.loads(call[1]) == arguments


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("city", "12", "12"),
        ("city", "true", "true"),
        ("city", ' "quoted" ', '"quoted"'),
        ("city", "a &lt; b &amp;&amp; c &copy;", "a < b && c &copy;"),
        ("city", "<b>bold</b>", "<b>bold</b>"),
        ("city", "<![CDATA[ a < b\n</param></function> &lt; ]]>", " a < b\n</param></function> &lt; "),
        ("city", "<![CDATA[a]]]]><![CDATA[>b]]>", "a]]>b"),
        ("city", "", ""),
        ("days", " 12 ", 12),
        ("days", "<![CDATA[12]]>", 12),
        ("days", "many", "many"),
        ("days", "NaN", "NaN"),
        ("is_dry", "true", True),
        ("is_dry", "False", False),
        ("stops", '["a", {"b": null}]', ["a", {"b": None}]),
        ("note", "null", None),
        ("note", "7", "7"),
        ("any", "7", 7),
        ("any", "seven", "seven"),
        ("odd", "[1", "[1"),
    ],
)
def test_the_schema_says_what_a_text_stands_for(name: str, text: str, value: Any) -> None:
    result = found(f'<function name="weather"><param name="{name}">{text}</param></function>')
    assert [(each, json.loads(arguments)) for each, arguments in result.named] == [("weather", {name: value})]


@pytest.mark.parametrize(
    "text",
    [
        "a < b and <funct",
        "<function",
        "<functional>",
        "<function name=>",
        '<function name="weather">: this is how one calls',
        '<function name="weather">',
        '<function name="weather"><par',
        f'<function name="{"w" * 400}"></function>',
        '<function name="">{"a": 1}</function>',
        "  \n",
        'Well: \n<function name="made_up"><param name="a">1</param></function>',
        '<function name="weather"><param>Paris</param></function> is how',
        PARIS.replace("</function>", '<param name="city">Rome</param></function>'),
        '<function name="book"></function>',
        '<function name="book"><param name="Seat">7</param></function>',
        '<function name="book"><param name="arguments">{"day": 1}</param></function>\n',
        '<function name="made_up"><param name="a">1',
    ],
)
def test_what_is_no_call_is_text_to_the_last_character(text: str) -> None:
    assert found(text) == Found(text)


@pytest.mark.parametrize(
    "text",
    [
        "<function>",
        "<function name=.",
        "<function name=w",
        '<function name=""',
        '<function name="weather":',
        '<function name="made_up">',
        '<function name="weather">:',
        '<function name="weather"><param>',
        '<function name="weather"><param name=.',
        PARIS.replace("</function>", '<param name="city">Rome</param>'),
    ],
)
def test_text_is_told_as_soon_as_it_can_be_no_call(text: str) -> None:
    """And not a character sooner."""
    parser = MiniCPM5Parser(FUNCTIONS)
    before = [parser.feed(character) for character in text[:-1]]
    assert not any(before)
    assert parser.feed(text[-1]) == [TextPiece(text)]


def test_a_call_behind_one_that_is_none_is_found() -> None:
    text = '<function name="made_up"><param name="a">1</param> '
    result = found(text + NOW)
    assert (result.text, result.named) == (text.rstrip(), [("now", "{}")])


@pytest.mark.parametrize("length", range(len('<function name="weather"><param'), len(PARIS)))
def test_a_call_that_is_cut_off_ends_where_the_answer_ends(length: int) -> None:
    """A value that is not whole is left out, and the arguments stay open."""
    is_whole = length >= PARIS.index("</function>")
    assert found(PARIS[:length]).named == [("weather", '{"city": "Paris"}' if is_whole else "{")]


TEXTS = st.lists(
    st.sampled_from(
        [
            PARIS,
            NOW,
            '<function name="book">',
            '<param name="seat">',
            "<param>",
            "<function",
            ' name="weather"',
            ">",
            '<param name="days">',
            "<param",
            "3",
            "</param>",
            " ",
        ]
        + ["</function>", "<![CDATA[", "]]>", "<", "Hi", "\n", "'", "/", "</", 'name="'],
    ),
    max_size=14,
).map("".join)


@given(TEXTS, st.data())
def test_pieces_find_the_same_as_the_whole(text: str, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=5).map(sorted))
    edges = [0, *cuts, len(text)]
    assert found(*(text[a:b] for a, b in zip(edges, edges[1:], strict=False))) == found(text)
    assert found(*text) == found(text)
