"""Answers that think: the inputs and splits of vLLM's own tests of its reasoning parsers, and a few more."""

from __future__ import annotations

import pytest
from tests.server.tools.folding import parse_in_pieces

from penstock_server.tools.parsers import HermesParser
from penstock_server.tools.parsing.thinking import PlainParser, ThinkingParser
from penstock_server.tools.reasoning import MARKERS

THOUGHT, REST = "This is a reasoning section", "This is the rest"
CALL = "<tool_call>\n<function=bash>\n<parameter=command>\ncat\n</parameter>\n</function>\n</tool_call>"

#: (answer, reasoning, content), with O and C for the markers, of a prompt that has the opener.
OPEN = [
    (f"{THOUGHT}C{REST}", THOUGHT, REST),
    (f"{THOUGHT}C", THOUGHT, ""),
    (THOUGHT, THOUGHT, ""),
    ("This\nThatCThis is the rest\nThat", "This\nThat", "This is the rest\nThat"),
    (f"C{REST}", "", REST),
    (f"O{THOUGHT}C{REST}", THOUGHT, REST),
    (f"O{THOUGHT}C", THOUGHT, ""),
    ("OThis\nThatCThis is the rest\nThat", "This\nThat", "This is the rest\nThat"),
    (f"O{THOUGHT}", THOUGHT, ""),
    ("", "", ""),
    (f"\nO{THOUGHT}C\n{REST}", THOUGHT, f"\n{REST}"),
    (f"{THOUGHT} O and C{REST}C", f"{THOUGHT} O and ", f"{REST}C"),
]
#: The same of a prompt that leaves the opener to the model.
SHUT = [
    (f"O{THOUGHT}C{REST}", THOUGHT, REST),
    (f"O{THOUGHT}C", THOUGHT, ""),
    (f"O{THOUGHT}", THOUGHT, ""),
    ("This is content", "", "This is content"),
    ("OThis\nThatCThis is the rest\nThat", "This\nThat", "This is the rest\nThat"),
    ("O foo C bar", " foo ", " bar"),
    ("\n\nOfooCbar", "foo", "bar"),
    (f"C{REST}", "", REST),
    (f"\nC{REST}", "", REST),
    (f"{REST}C{REST}", "", f"{REST}C{REST}"),
    ("", "", ""),
    ("\n  ", "", "\n  "),
]


def marked(text: str, opener: str, closer: str) -> str:
    return text.replace("O", "\0").replace("C", closer).replace("\0", opener)


@pytest.mark.parametrize("format", sorted(MARKERS.keys() - {"harmony"}))
@pytest.mark.parametrize(
    ("is_open", "answer", "reasoning", "content"),
    [*((True, *case) for case in OPEN), *((False, *case) for case in SHUT)],
)
def test_the_parts_of_an_answer(
    format: str, is_open: bool, answer: str, reasoning: str, content: str
) -> None:
    markers = MARKERS[format]  # type: ignore[index]
    found = parse_in_pieces(
        lambda: ThinkingParser(PlainParser(), *markers, is_open), marked(answer, *markers)
    )
    assert (found.reasoning, found.text) == (marked(reasoning, *markers), marked(content, *markers))


@pytest.mark.parametrize(
    ("answer", "reasoning", "content"),
    [
        ("I need to read the file.\n\n" + CALL, "I need to read the file.\n\n", CALL),
        ("<think>I need to read the file.\n\n" + CALL, "I need to read the file.\n\n", CALL),
        ("reasoning section</think>content", "reasoning section", "content"),
        ("a <tool_ b</think>" + CALL, "a <tool_ b", CALL),
    ],
)
def test_a_call_ends_the_thinking(answer: str, reasoning: str, content: str) -> None:
    found = parse_in_pieces(
        lambda: ThinkingParser(PlainParser(), *MARKERS["think"], True, ("<tool_call>",)), answer
    )
    assert (found.reasoning, found.text) == (reasoning, content)


def test_what_is_behind_the_thinking_is_read_by_another_parser() -> None:
    answer = 'Hm.</think>Well. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    found = parse_in_pieces(
        lambda: ThinkingParser(HermesParser(), *MARKERS["think"], True, ("<tool_call>",)), answer
    )
    assert (found.reasoning, found.text, found.named) == ("Hm.", "Well.", [("f", '{"a": 1}')])
