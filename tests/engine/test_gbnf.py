"""Grammars in GBNF: rewritten in Lark, in little time whatever they look like."""

from __future__ import annotations

import contextlib
import time

import pytest

from penstock.errors import InvalidParameter
from penstock.generation.grammars.grammar import MAX_GRAMMAR_CHARS, Grammar


def test_rules_keep_their_meaning() -> None:
    text = 'root ::= item (", " item)*\n# a comment\nitem ::= word-1 | [0-9]+\nword-1 ::= "a"\n'
    lines = set(Grammar.lark(text).text.splitlines())
    assert {'start: ITEM (", " ITEM)*', 'WORD_1: "a"'} <= lines


def test_rules_that_use_each_other() -> None:
    lines = set(Grammar.lark('root ::= list\nlist ::= "(" list? ")" end\nend ::= "."').text.splitlines())
    assert {"start: list", 'list: "(" list? ")" END', 'END: "."'} <= lines


@pytest.mark.parametrize(
    "text",
    [
        "\n" * 60_000,
        'root ::= "a"' + "\n" * 60_000,
        "start\n" + "\n" * 60_000,
        "".join(f"{'root' if not each else f'r{each}'} ::= r{each + 1}\n" for each in range(3000))
        + 'r3000 ::= "a"',
        'root ::= "a"' + ' | "a"' * MAX_GRAMMAR_CHARS,
    ],
    ids=["empty lines", "empty lines behind a rule", "no rule", "a chain", "too long"],
)
def test_no_grammar_takes_long(text: str) -> None:
    begin = time.process_time()
    with contextlib.suppress(InvalidParameter):
        Grammar.lark(text)
    assert time.process_time() - begin < 2
