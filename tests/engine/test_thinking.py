"""Answers that think before what a grammar demands: where the thinking ends, and what a limit forces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drafters import Forest, Oracle

from penstock.engine import Completion, Engine
from penstock.errors import InvalidParameter
from penstock.generation.grammars.blanks import Blanks
from penstock.generation.grammars.grammar import Grammar
from penstock.generation.grammars.thinking import Thinking, ThinkingMatcher
from penstock.generation.requests.generation_request import SamplingParams
from penstock.generation.sequence import FinishReason
from penstock.text.tokenizer import Tokenizer

PROMPT = [5, 6, 7]
YES = Grammar.json_schema({"enum": ["yes", "no"]})


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Engine]:
    with Engine.load(tiny_llama) as engine:
        yield engine


def thinking(tokenizer: Tokenizer, is_open: bool = True, **fields: Any) -> Thinking:
    """The opener is one token of the vocabulary, the closer several."""
    closer = tuple(tokenizer.encode("</x>", add_special_tokens=False))
    assert len(closer) > 1
    return Thinking("\x01", "</x>", is_open, **{"forced": closer, **fields})


def answer(engine: Engine, think: Thinking, seed: int = 0, **fields: Any) -> Completion:
    (found,) = engine.generate(
        [PROMPT], SamplingParams(thinking=think, seed=seed, **{"max_tokens": 60, **fields})
    )
    return found


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("seed", range(4))
def test_a_limit_ends_the_thinking_and_then_the_grammar_begins(
    engine: Engine, budget: int, seed: int
) -> None:
    tokenizer = engine.tokenizer
    think = thinking(tokenizer, max_tokens=budget)
    found = answer(engine, think, seed, grammar=YES)
    assert not set(found.token_ids) & tokenizer.eos_token_ids
    assert tuple(found.token_ids[budget : budget + len(think.forced)]) == think.forced
    rest = tokenizer.decode(found.token_ids[budget + len(think.forced) :])
    assert json.loads(rest) in ("yes", "no") and found.finish_reason is FinishReason.STOP
    # The twin samples each token, and computes no token ahead.
    for twin in ({"logprobs": 0}, {"speculation": False}):
        assert answer(engine, think, seed, grammar=YES, **twin).token_ids == found.token_ids


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_guesses_change_nothing_of_it(engine: Engine, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees that hide the answer run over the end of the thinking, and along what the limit forces."""
    params = [
        SamplingParams(
            thinking=thinking(engine.tokenizer, max_tokens=budget), seed=seed, grammar=grammar, max_tokens=60
        )
        for seed in range(6)
        for grammar in (YES, None)
    ]
    prompts = [[5, 6, number] for number in range(len(params))]
    expected = [found.token_ids for found in engine.generate(prompts, params)]
    keys = ((each.seed, *prompt) for each, prompt in zip(params, prompts, strict=True))
    drafter = Forest(Oracle(dict(zip(keys, expected, strict=True)), 9))
    monkeypatch.setattr(engine.scheduler, "_drafter", drafter)
    before = engine.metrics.accepted_tokens
    assert [found.token_ids for found in engine.generate(prompts, params)] == expected
    assert engine.metrics.accepted_tokens > before + 20


def test_the_model_ends_its_thinking_itself(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    lead = tuple(tokenizer.encode("=", add_special_tokens=False))
    bias = {tokenizer.encode("e", add_special_tokens=False)[0]: 3.0}
    for seed in range(3):
        think = Thinking("\x01", "e", True, lead=lead)
        found = answer(engine, think, seed, grammar=YES, logit_bias=bias, max_tokens=250)
        spelled = [tokenizer.token_bytes(token_id) for token_id in found.token_ids]
        closer = next(index for index, token in enumerate(spelled) if b"e" in token)
        assert spelled[closer + 1] == b"="
        assert json.loads(b"".join(spelled[closer + 2 :])) in ("yes", "no")


def test_without_a_limit_or_a_grammar_nothing_changes(engine: Engine) -> None:
    for is_open in (True, False):
        free = answer(engine, thinking(engine.tokenizer, is_open), temperature=0, ignore_eos=True)
        (plain,) = engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        assert free.token_ids == plain.token_ids


def matcher(tokenizer: Tokenizer, think: Thinking, inner: Any = None) -> ThinkingMatcher:
    return ThinkingMatcher(think, inner, tokenizer.token_bytes, tokenizer.eos_token_ids)


class OnlyA:
    """A matcher that wants the token of "a", once."""

    error = ""

    def __init__(self, token_id: int) -> None:
        self.token_id, self.num_taken = token_id, 0

    @property
    def is_complete(self) -> bool:
        return self.num_taken == 1

    @property
    def forced(self) -> int | None:
        return None if self.is_complete else self.token_id

    @property
    def allowed(self) -> int:
        return 0 if self.is_complete else 1 << self.token_id

    def advance(self, token_id: int) -> None:
        assert token_id == self.token_id
        self.num_taken += 1

    def fork(self) -> OnlyA:
        other = OnlyA(self.token_id)
        other.num_taken = self.num_taken
        return other

    def retreat(self) -> None:
        self.num_taken -= 1


def test_the_model_chooses_whether_to_think(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    ids = {text: tokenizer.encode(text, add_special_tokens=False)[0] for text in ("a", "\x01", "b")}
    closer = tokenizer.encode("</x>", add_special_tokens=False)
    think = thinking(tokenizer, False, opener_id=ids["\x01"], max_tokens=3)
    at_once = matcher(tokenizer, think, OnlyA(ids["a"]))
    assert at_once.allowed == 1 << ids["a"] | 1 << ids["\x01"] and at_once.forced is None
    later = at_once.after(ids["\x01"])
    assert later.forced is None and later.allowed >> ids["b"] & 1 and not later.is_complete
    assert not any(later.allowed >> end & 1 for end in tokenizer.eos_token_ids)
    for token_id in (ids["b"], *closer[:2]):
        later.advance(token_id)
    assert [later.forced, later.allowed] == [closer[0], 1 << closer[0]]  # the limit counts half a closer, too
    for token_id in closer:
        later.advance(token_id)
    assert later.forced == ids["a"]
    later.advance(ids["a"])
    assert later.is_complete
    later.retreat()
    assert not later.is_complete and later.forced == ids["a"]
    at_once.advance(ids["a"])
    assert at_once.is_complete
    at_once.retreat()
    assert at_once.allowed == 1 << ids["a"] | 1 << ids["\x01"]
    never = matcher(
        tokenizer, thinking(tokenizer, False, opener_id=ids["\x01"], max_tokens=0), OnlyA(ids["a"])
    )
    assert never.allowed == 1 << ids["a"]
    ends = matcher(tokenizer, thinking(tokenizer, may_end=True), OnlyA(ids["a"])).allowed
    assert all(ends >> end & 1 for end in tokenizer.eos_token_ids)


def test_wrong_values_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidParameter, match="text that ends it"):
        Thinking("<x>", "", True)
    for fields in ({"max_tokens": -1, "forced": (5,)}, {"max_tokens": 5}):
        with pytest.raises(InvalidParameter, match="at least 0"):
            Thinking("<x>", "</x>", True, **fields)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="thinking"):
        SamplingParams(thinking=thinking(engine.tokenizer), blanks=Blanks((5,)))
    with pytest.raises(InvalidParameter, match="token id above"):
        answer(engine, thinking(engine.tokenizer, forced=(10**6,), max_tokens=1))
