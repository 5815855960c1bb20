"""Grammars of calls admit what a schema admits, wherever it has come to stand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from penstock.errors import InvalidParameter
from penstock.generation.grammars.grammar import Grammar
from penstock_server.protocol.tools import Function
from penstock_server.tools.schemas import (
    MAX_CALLS,
    arguments_grammar,
    calls_grammar,
    calls_or_json_grammar,
    tagged_calls_grammar,
)

TREE = {
    "type": "object",
    "properties": {
        "kind": {"$ref": "#/$defs/Kind"},
        "left": {"$ref": "#"},
        "$ref": {"const": {"$ref": "#/data"}},
    },
    "required": ["kind"],
    "additionalProperties": False,
    "$defs": {"Kind": {"enum": ["a", "b"]}},
}
KIND = {"properties": {"kind": {"$ref": "#/$defs/Kind"}}, "$defs": {"Kind": {"enum": ["c"]}}}
TOKENIZER = LLTokenizer("byte")


def function(name: str, parameters: Any = None, strict: bool = False) -> Function:
    return Function.model_validate({"name": name, "parameters": parameters, "strict": strict})


def admits(grammar: Grammar, text: str) -> bool:
    if grammar.kind == "lark":
        source = LLMatcher.grammar_from_lark(grammar.text)
    else:
        source = LLMatcher.grammar_from_json_schema(grammar.text, defaults={"whitespace_flexible": False})
    matcher = LLMatcher(TOKENIZER, source)
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "parameters": arguments}, separators=(",", ":"))


FUNCTIONS = [function("tree", TREE), function("kind", KIND), function("now")]


@pytest.mark.parametrize(
    ("text", "is_admitted"),
    [
        (call("tree", kind="a"), True),
        (call("tree", kind="a", left={"kind": "b", "left": {"kind": "a"}}), True),
        (call("tree", kind="a", **{"$ref": {"$ref": "#/data"}}), True),
        (call("tree", kind="c"), False),
        (call("tree"), False),
        (call("kind", kind="c"), True),
        (call("kind", kind="a"), False),
        (call("now"), True),
        (call("now", kind="a"), False),
        (call("other"), False),
        ("{}", False),
        ("", False),
    ],
)
def test_one_call(text: str, is_admitted: bool) -> None:
    assert admits(calls_grammar(FUNCTIONS, is_list=False), text) == is_admitted
    assert admits(calls_grammar(FUNCTIONS, is_list=True), f"[{text}]") == is_admitted


def test_lists_of_calls() -> None:
    grammar = calls_grammar(FUNCTIONS, is_list=True)
    now = call("now")
    assert admits(grammar, f"[{now},{call('tree', kind='a')}]")
    assert not admits(grammar, "[]") and not admits(grammar, now)
    assert admits(grammar, f"[{','.join([now] * MAX_CALLS)}]")
    assert not admits(grammar, f"[{','.join([now] * (MAX_CALLS + 1))}]")


def test_arguments_are_objects() -> None:
    assert admits(arguments_grammar(function("f", {})), '{"any":[1]}')
    assert not admits(arguments_grammar(function("f", {})), "[]")
    assert admits(arguments_grammar(function("f")), "{}")
    assert not admits(arguments_grammar(function("f")), '{"any":1}')


def test_objects_are_closed_unless_something_is_said_of_other_properties() -> None:
    inner = {"type": "object", "properties": {"default": {"type": "integer"}}}
    plain = {"properties": {"a": inner}, "default": {"properties": {}}}
    assert admits(arguments_grammar(function("f", plain)), '{"a":{"default":1}}')
    assert not admits(arguments_grammar(function("f", plain)), '{"b":1}')
    assert not admits(arguments_grammar(function("f", plain)), '{"a":{"b":1}}')
    assert admits(arguments_grammar(function("f", plain | {"additionalProperties": True})), '{"b":1}')
    joined = {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"const": 2}}}]}
    assert admits(arguments_grammar(function("f", joined)), '{"a":1,"b":2}')
    assert admits(arguments_grammar(function("f", {})), '{"b":1}')


def test_text_with_strict_calls() -> None:
    functions = [function("tree", TREE, strict=True), function("kind", KIND)]
    grammar = tagged_calls_grammar(functions, is_list=True)

    def tagged(name: str, arguments: str) -> str:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    tree, loose = tagged("tree", '{"kind":"a"}'), tagged("kind", '{"kind":"x"}')
    assert admits(grammar, "") and admits(grammar, "1 < 2, <tool> and\nno call")
    assert admits(grammar, tree) and admits(grammar, f"Well, \n{tree}\n{loose}\nDone.")
    assert not admits(grammar, tagged("tree", '{"kind":"x"}'))
    assert not admits(grammar, tagged("other", "{}"))
    assert not admits(grammar, "<tool_call>no")
    only_one = tagged_calls_grammar(functions, is_list=False)
    assert admits(only_one, f"Well, {tree}") and admits(only_one, "text")
    assert not admits(only_one, tree + tree) and not admits(only_one, f"{tree} ")


def test_calls_or_json() -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]})
    functions = [function("kind", KIND, strict=True), function("now")]
    call = '<tool_call>\n{"name": "kind", "arguments": {"kind":"c"}}\n</tool_call>'
    for is_list in (True, False):
        grammar = calls_or_json_grammar(functions, is_list, schema)
        assert admits(grammar, call) and admits(grammar, '{"a":1}')
        assert admits(grammar, f"{call}\n{call}") == is_list
        for text in ("", "text", '{"a":2}', '{"a": 1}', f"text{call}", call.replace('"c"', '"d"')):
            assert not admits(grammar, text), text


def test_what_is_no_json() -> None:
    with pytest.raises(InvalidParameter):
        arguments_grammar(Function.model_construct(name="f", parameters={"x": float("nan")}))
