"""Each format as its models write it; and however an answer is cut, the same is found in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_server.tools.call_filters import DistinctCalls, FirstCall
from penstock_server.tools.parsers import (
    ArgumentsParser,
    HermesParser,
    ListParser,
    Llama3Parser,
    MistralParser,
)
from penstock_server.tools.reading import ArgumentsPiece, CallBegin, TextPiece

from .folding import Found, parse

NAMES = ("weather", "add")
MAKERS: dict[str, Callable[[], Any]] = {
    "hermes": HermesParser,
    "llama3": lambda: Llama3Parser(NAMES),
    "mistral": MistralParser,
    "list": ListParser,
    "arguments": lambda: ArgumentsParser("add"),
    "first": lambda: FirstCall(HermesParser()),
    "distinct": lambda: DistinctCalls(ListParser()),
}

PARIS = '{"city": "Paris"}'
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
SUM = '{"name": "add", "parameters": {"a": [1, {"b": "}"}], "c": "\\"]"}}'
SUM_ARGUMENTS = '{"a": [1, {"b": "}"}], "c": "\\"]"}'


def found(name: str, text: str) -> Found:
    return parse(MAKERS[name](), [text])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello <b>you</b>", "Hello <b>you</b>", []),
        (f"<tool_call>\n{CALL}\n</tool_call>", "", [("weather", PARIS)]),
        (
            f"Let me see.\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{SUM}\n</tool_call>\n",
            "Let me see.",
            [("weather", PARIS), ("add", SUM_ARGUMENTS)],
        ),
        (f"<tool_call>{CALL}", "", [("weather", PARIS)]),
        (f"<tool_call>{CALL}</tool_call>\nDone. ", "\nDone. ", [("weather", PARIS)]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]),
        ('<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
        ('<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
        ('<tool_call>{"id": 7, "name": "made_up", "arguments": {}}', "", [("made_up", "{}")]),
        ('<tool_call>{"name": "add", "arguments": {"a": "</tool_ca', "", [("add", '{"a": "</tool_ca')]),
        (f"<tool_call>{CALL}\n</tool_ca", "", [("weather", PARIS)]),
    ],
)
def test_hermes(text: str, content: str, calls: list[Any]) -> None:
    result = found("hermes", text)
    assert (result.text, result.named) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "a < b and <tool_ca",
        "Hi <tool_call>no JSON</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": 7}</tool_call>',
        '<tool_call>{"name": "add" "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", }</tool_call>',
        '<tool_call>{"name": "ad',
        "<tool_call>",
        "<tool_call>\n<function=add>\n</function>\n</tool_call>",
        "  \n",
    ],
)
def test_what_is_no_call_is_text_to_the_last_character(text: str) -> None:
    assert found("hermes", text) == Found(text)


def test_a_call_after_a_malformed_one() -> None:
    result = found("hermes", f'<tool_call>{{"name": <tool_call>{CALL}</tool_call>')
    assert (result.text, result.named) == ('<tool_call>{"name": ', [("weather", PARIS)])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (SUM, "", [("add", SUM_ARGUMENTS)]),
        (f"\n\n{CALL}", "", [("weather", PARIS)]),
        (f"<|python_tag|>{SUM}", "", [("add", SUM_ARGUMENTS)]),
        (f"<|python_tag|>{SUM}; {CALL};", "", [("add", SUM_ARGUMENTS), ("weather", PARIS)]),
        (f"{SUM}\n{CALL}", "", [("add", SUM_ARGUMENTS), ("weather", PARIS)]),
        (f"{SUM};<|python_tag|>{CALL}", "", [("add", SUM_ARGUMENTS), ("weather", PARIS)]),
        (f"I will add. <|python_tag|>{SUM}", "I will add.", [("add", SUM_ARGUMENTS)]),
        (f"Use {SUM}", f"Use {SUM}", []),
        ('{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}', []),
        ('{"age": 7}', '{"age": 7}', []),
        ('<|python_tag|>{"name": "Ann", "parameters": {}}', "", [("Ann", "{}")]),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        (f"{SUM}; no more", "; no more", [("add", SUM_ARGUMENTS)]),
        ("Hi <|pyth", "Hi <|pyth", []),
        ("", "", []),
    ],
)
def test_llama3(text: str, content: str, calls: list[Any]) -> None:
    result = found("llama3", text)
    assert (result.text, result.named) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"[TOOL_CALLS] [{CALL}]", "", [["weather", PARIS, None]]),
        (
            f"Sure. [TOOL_CALLS][{CALL}, {SUM}]",
            "Sure.",
            [["weather", PARIS, None], ["add", SUM_ARGUMENTS, None]],
        ),
        (f"[TOOL_CALLS]{CALL}", "", [["weather", PARIS, None]]),
        (f"[TOOL_CALLS]weather{PARIS}", "", [["weather", PARIS, None]]),
        (
            f'[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{PARIS}[TOOL_CALLS]add[ARGS]{{"a": "}}"}}',
            "",
            [["weather", PARIS, "a1B2c3D4e"], ["add", '{"a": "}"}', None]],
        ),
        ('[TOOL_CALLS]add{"a": 1', "", [["add", '{"a": 1', None]]),
        (f"[TOOL_CALLS]two words{PARIS}", f"[TOOL_CALLS]two words{PARIS}", []),
        ("[TOOL_CALLS] what?", "[TOOL_CALLS] what?", []),
        ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
        ("[TOOL_CALLS]", "[TOOL_CALLS]", []),
        (f"[TOOL_CALLS][{CALL}, what?]", ", what?]", [["weather", PARIS, None]]),
        ("a [TOOL", "a [TOOL", []),
    ],
)
def test_mistral(text: str, content: str, calls: list[Any]) -> None:
    result = found("mistral", text)
    assert (result.text, result.calls) == (content, calls)


def test_forced_calls() -> None:
    both = found("list", f"[{CALL},{SUM}]")
    assert (both.text, both.named) == ("", [("weather", PARIS), ("add", SUM_ARGUMENTS)])
    assert found("list", CALL).named == [("weather", PARIS)]
    assert found("list", "so what") == Found("so what")
    assert found("list", f'[{CALL},{{"name":"ad') == found("list", f"[{CALL}]")
    assert found("list", '[{"name":"ad') == Found('[{"name":"ad')
    assert found("arguments", PARIS) == Found("", [["add", PARIS, None]])


def test_at_most_one_call() -> None:
    result = found("first", f"<tool_call>{CALL}</tool_call><tool_call>{SUM}</tool_call> Done.")
    assert (result.text, result.named) == (" Done.", [("weather", PARIS)])


def test_text_comes_at_once_and_arguments_as_they_are_written() -> None:
    parser = HermesParser()
    pieces = ("Hm, ", "<", "tool", '_call>{"name": "add", ', '"arguments": ', '{"a": ', "1}", "}")
    assert [parser.feed(piece) for piece in pieces] == [
        [TextPiece("Hm,")],
        *([[]] * 4),
        [CallBegin("add"), ArgumentsPiece('{"a": ')],
        [ArgumentsPiece("1}")],
        [],
    ]


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "tool_call>"),
    *('[]{},;"\\:< \né7'),
    *("name", '"name": "add"', '"arguments": ', '"parameters": {', "abc", "null", CALL, SUM),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


def cut(text: str, places: list[int]) -> list[str]:
    marks = sorted({0, len(text), *(place for place in places if place < len(text))})
    return [text[begin:end] for begin, end in zip(marks, marks[1:], strict=False)]


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, places=st.lists(st.integers(0, 200), max_size=10))
def test_any_cut_finds_the_same(name: str, text: str, places: list[int]) -> None:
    whole = parse(MAKERS[name](), [text])
    assert parse(MAKERS[name](), cut(text, places)) == whole
    assert parse(MAKERS[name](), list(text)) == whole


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "list"])
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_nothing_is_lost_where_there_is_no_call(name: str, text: str) -> None:
    result = parse(MAKERS[name](), [text])
    if not result.calls:
        assert result.text == text


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=50, deadline=None)
@given(calls=st.lists(st.dictionaries(st.text(), JSON_VALUES, max_size=3), min_size=1, max_size=3))
def test_any_arguments_are_found_in_every_format(calls: list[dict[str, Any]]) -> None:
    for word in ("arguments", "parameters"):
        each = [json.dumps({"name": "add", word: arguments}) for arguments in calls]
        bare = [f"[TOOL_CALLS]add{json.dumps(arguments)}" for arguments in calls]
        written = {
            "hermes": "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in each),
            "llama3": "; ".join(each),
            "mistral": f"[TOOL_CALLS][{', '.join(each)}]",
            "list": f"[{', '.join(each)}]",
        }
        for name, text in [*written.items(), ("mistral", "".join(bare))]:
            result = found(name, text)
            assert [json.loads(arguments) for _, arguments in result.named] == calls, (name, text)
            assert result.text == ""
