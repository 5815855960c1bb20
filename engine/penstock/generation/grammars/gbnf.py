"""GBNF, llama.cpp's form of grammars, rewritten in Lark in time that grows with the grammar's length only."""

from __future__ import annotations

import re
from typing import Any

#: The beginning of a rule in GBNF, and what only Lark has. Each lies in one line: a search over white space
#: with line ends in it takes time that grows with the square of a text's empty lines.
_RULE = re.compile(r"(?:^|[\r\n])[ \t]*[\w-]+[ \t]*::=")
_LARK = re.compile(r"(?:^|[\r\n])[ \t]*(?:%llguidance\b|start[ \t]*:)")


def is_gbnf(text: str) -> bool:
    return _RULE.search(text) is not None and _LARK.search(text) is None


def as_lark(text: str) -> str:
    """A grammar in GBNF, in Lark. Raises errors of many types for one that is wrong."""
    from llguidance.gbnf_to_lark import GrammarParser, resolve

    rules = _used_first(GrammarParser().parse(text))
    resolve(rules)
    return "\n".join(("%llguidance {}", *map(str, rules.values()), ""))


def _used_first(rules: dict[str, Any]) -> dict[str, Any]:
    """The rules, each after those that it uses, but for rules that use each other. The package looks through
    all rules again as long as it finds one of which all parts are terminals, which is once in this order."""
    done: dict[str, Any] = {}
    seen = set[str]()
    for first in rules:
        waiting = [(first, False)]
        while waiting:
            name, has_parts = waiting.pop()
            if has_parts:
                done[name] = rules[name]
            elif name not in seen:
                seen.add(name)
                waiting.append((name, True))
                waiting += [(used, False) for used in _used(rules[name]) if used in rules]
    return done


def _used(rule: Any) -> set[str]:
    """The names of rules that a rule uses."""
    found, nodes = set[str](), [rule]
    while nodes:
        node = nodes.pop()
        nodes += node.children()
        if node is not rule and hasattr(node, "target"):
            found.add(node.name)
    return found
