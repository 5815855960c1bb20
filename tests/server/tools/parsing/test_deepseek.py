"""DeepSeek's calls: the inputs of vLLM's tests of its parsers."""

from __future__ import annotations

import json

import pytest
from tests.server.tools.folding import parse_in_pieces

from penstock_server.tools.parsing.deepseek import DeepSeekParser

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def old(name: str, arguments: str) -> str:
    head = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n"
    return f"{head}```json\n{arguments}\n```<｜tool▁call▁end｜>"


def new(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


TYPES = (
    '{"string_field": "hello", "int_field": 42, "float_field": 3.14, "bool_field": true, "null_field": null, '
    '"array_field": ["a", "b"], "object_field": {"nested": "value"}, "empty_array": [], "empty_object": {}}'
)
ESCAPED = r'{"text": "He said \"hello\"", "path": "C:\\Users\\file", "newline": "line1\nline2", "x": "}```"}'


@pytest.mark.parametrize("write", [old, new])
@pytest.mark.parametrize(
    "calls",
    [
        [("get_weather", '{"city": "Tokyo", "unit": "celsius"}')],
        [("get_weather", '{"city": "Tokyo"}'), ("search_hotels", '{"check_in": "2025-01-15"}')],
        [("test_function", TYPES)],
        [("get_current_time", "{}")],
        [("send_message", ESCAPED)],
    ],
)
def test_calls(write: object, calls: list[tuple[str, str]]) -> None:
    assert callable(write)
    block = BEGIN + "".join(write(*each) for each in calls) + END
    for text in (block, f"Let me check.\n{block}", f"Let me check.{block} Done."):
        found = parse_in_pieces(DeepSeekParser, text)
        assert found.named == calls and all(json.loads(each) is not None for _, each in found.named)
        assert found.text == ("" if text == block else "Let me check." + text.partition(END)[2])


@pytest.mark.parametrize(
    "text",
    [
        "How can I help you today?",
        "Let me look that up.<｜tool▁calls▁begin｜>get_weather",
        '<｜tool▁calls▁begin｜>foo<｜tool▁sep｜>{"x":1}<｜tool▁calls▁end｜>',
        '<｜tool▁calls▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Tokyo"}\n```',
        "",
    ],
)
def test_text_that_is_no_call(text: str) -> None:
    found = parse_in_pieces(DeepSeekParser, text)
    assert (found.text, found.calls) == (text, [])


def test_broken_arguments_end_with_the_call() -> None:
    text = BEGIN + old("get_weather", '{"city": "Tokyo"') + new("f", "{}") + END
    found = parse_in_pieces(DeepSeekParser, text)
    assert [name for name, _ in found.named] == ["get_weather", "f"]
    assert found.named[0][1].startswith('{"city": "Tokyo"') and found.text == ""


def test_a_call_that_is_cut_off() -> None:
    text = (BEGIN + new("f", '{"city": "Tokyo"}')).partition("yo")[0]
    assert parse_in_pieces(DeepSeekParser, text).named == [("f", '{"city": "Tok')]


def test_an_answer_that_is_cut_off_within_the_last_mark() -> None:
    text = BEGIN + new("f", "{}") + END
    for length in range(len(text) - len(END), len(text)):
        found = parse_in_pieces(DeepSeekParser, text[:length])
        assert (found.text, found.named) == ("", [("f", "{}")])
