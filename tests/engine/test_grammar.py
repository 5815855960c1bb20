"""What a grammar's constructors take and refuse, before any model has a say."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from penstock.errors import InvalidParameter
from penstock.generation.grammars.grammar import MAX_GRAMMAR_CHARS, Grammar
from penstock.generation.requests.generation_request import SamplingParams


def test_grammars_are_values() -> None:
    schema = {"type": "object", "properties": {"größe": {"type": "integer"}}}
    made = [Grammar.json_schema(schema), Grammar.json_schema(json.dumps(schema)), Grammar.json_object()]
    made += [Grammar.regex("a"), Grammar.lark("a"), Grammar.choice(["a"]), Grammar.choice(["a", "b"])]
    assert made[0] == made[1] and len(set(made)) == 6
    assert json.loads(made[0].text) == schema | {"additionalProperties": False}
    assert Grammar.json_schema(True) == Grammar.json_schema({})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Grammar.json_schema("{"), "not JSON"),
        (lambda: Grammar.json_schema("[" * 100_000), "not JSON"),
        (lambda: Grammar.json_schema("[]"), "not an object"),
        (lambda: Grammar.json_schema(False), "not an object"),
        (lambda: Grammar.json_schema({"const": float("nan")}), "const is nan"),
        (lambda: Grammar.json_schema({"const": {1}}), "written as JSON"),
        (lambda: Grammar.json_schema({"x-guidance": 3}), "x-guidance"),
        (lambda: Grammar.choice([]), "at least one text"),
        (lambda: Grammar.choice(["a", ""]), "none may be empty"),
        (lambda: Grammar.regex("\ud800"), "half a surrogate pair"),
        (lambda: Grammar.regex("a" * (MAX_GRAMMAR_CHARS + 1)), "at most"),
    ],
)
def test_what_no_model_could_follow_is_refused(make: Callable[[], Grammar], said: str) -> None:
    with pytest.raises(InvalidParameter, match=said) as caught:
        make()
    assert caught.value.param == "grammar"


def test_a_grammar_says_itself_where_the_answer_ends() -> None:
    with pytest.raises(InvalidParameter, match="where there is a grammar") as caught:
        SamplingParams(grammar=Grammar.json_object(), ignore_eos=True)
    assert caught.value.param == "ignore_eos"
