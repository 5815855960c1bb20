"""gpt-oss' answers: the inputs of vLLM's and llama.cpp's tests, and a few that a model gets wrong."""

from __future__ import annotations

import pytest
from tests.server.tools.folding import parse_in_pieces

from penstock_server.tools.parsing.harmony import HarmonyParser
from penstock_server.tools.parsing.thinking import PlainParser

TOKYO = '{"location": "Tokyo"}'
ONE = '{"a": 1}'
ANALYSIS = "<|channel|>analysis<|message|>I'm\nthinking<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
HELLO = "Hello, world!\nWhat's up?"


def call(name: str, arguments: str, kind: str = " <|constrain|>json") -> str:
    return f"<|channel|>commentary to=functions.{name}{kind}<|message|>{arguments}<|call|>"


@pytest.mark.parametrize(
    ("answer", "reasoning", "content", "calls"),
    [
        (f"{FINAL}{HELLO}", "", HELLO, []),
        (f"{FINAL}{HELLO}<|return|>", "", HELLO, []),
        (f"{ANALYSIS}{NEXT}{FINAL}{HELLO}", "I'm\nthinking", HELLO, []),
        (f"{ANALYSIS}{NEXT}<|channel|>final <|constrain|>json<|message|>{{}}", "I'm\nthinking", "{}", []),
        (f"{ANALYSIS}{NEXT}<|channel|>final", "I'm\nthinking", "", []),
        (ANALYSIS.removesuffix("<|end|>"), "I'm\nthinking", "", []),
        (f"{ANALYSIS}{NEXT}{call('special', ONE)}", "I'm\nthinking", "", [("special", '{"a": 1}')]),
        (
            f"{ANALYSIS}{NEXT} to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>",
            "I'm\nthinking",
            "",
            [("f", "{}")],
        ),
        (f"{ANALYSIS}{NEXT} to=f<|channel|>analysis<|message|>{{}}", "I'm\nthinking", "", [("f", "{}")]),
        (
            f"{ANALYSIS}{NEXT}<|channel|>commentary<|message|>I call.<|end|>{NEXT}{call('f', '{}')}",
            "I'm\nthinking",
            "I call.",
            [("f", "{}")],
        ),
        (
            f"{ANALYSIS}{NEXT}{call('get_current_weather', TOKYO)}{NEXT}"
            f"{call('no_content_type', TOKYO, '')}{NEXT}{call('no_json', 'foo', '')}{NEXT}"
            f"{call('no_args', '')}",
            "I'm\nthinking",
            "",
            [
                ("get_current_weather", '{"location": "Tokyo"}'),
                ("no_content_type", '{"location": "Tokyo"}'),
                ("no_json", "foo"),
                ("no_args", ""),
            ],
        ),
        (
            f"{ANALYSIS}{NEXT}{call('f', ONE)}{NEXT}{FINAL}It is done.",
            "I'm\nthinking",
            "It is done.",
            [("f", '{"a": 1}')],
        ),
        (f"{ANALYSIS}{NEXT}<|channel|>analysis<|message|>More.<|end|>", "I'm\nthinking\nMore.", "", []),
        (f"{ANALYSIS}{FINAL}No start.", "I'm\nthinking", "No start.", []),
        ("Text of a model that forgot the channels.", "", "Text of a model that forgot the channels.", []),
        # llama.cpp's: a tool that was not offered, and a head that names the assistant.
        (
            f"{ANALYSIS}{NEXT}<|channel|>commentary to=python <|constrain|>code<|message|>print(1)",
            "I'm\nthinking",
            "",
            [],
        ),
        (
            f"<|channel|>commentary to=assistant{ANALYSIS}{NEXT}{FINAL}{HELLO}",
            "I'm\nthinking",
            HELLO,
            [],
        ),
        # A call that is cut off within its head.
        (
            f"{ANALYSIS}{NEXT} to=functions.f<|channel|>commentary <|constrain|>json",
            "I'm\nthinking",
            "",
            [],
        ),
        ("to be or not", "", "to be or not", []),
        ("<|channel|>final", "", "", []),
    ],
)
def test_messages(answer: str, reasoning: str, content: str, calls: list[tuple[str, str]]) -> None:
    found = parse_in_pieces(lambda: HarmonyParser(PlainParser(), ["f"]), answer)
    assert (found.reasoning, found.text, found.named) == (reasoning, content, calls)


def test_without_tools_a_call_is_text() -> None:
    found = parse_in_pieces(lambda: HarmonyParser(PlainParser(), None), call("f", "{}"))
    assert (found.text, found.calls) == ("{}", [])


@pytest.mark.parametrize("functions", [None, ["f"]])
@pytest.mark.parametrize("tool", ["python", "container.exec", "browser.search"])
def test_messages_to_tools_of_the_models_own_are_left_out(tool: str, functions: list[str] | None) -> None:
    answer = f"{ANALYSIS}{NEXT} to={tool}<|channel|>commentary<|message|>print(1)<|call|>{NEXT}{FINAL}{HELLO}"
    found = parse_in_pieces(lambda: HarmonyParser(PlainParser(), functions), answer)
    assert (found.text, found.calls) == (HELLO, [])
