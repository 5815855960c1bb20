"""Answers that fill in blanks: the form of the tokens, forced tokens without steps, and the twin that samples
each of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_encoder_decoder import PROMPTS, VOCAB_SIZE, build, load

from penstock.engine import Completion, Engine
from penstock.errors import ContextOverflow, InvalidParameter
from penstock.generation.beam_search import BeamParams
from penstock.generation.grammars.blanks import BlankMatcher, Blanks
from penstock.generation.grammars.grammar import Grammar
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.sequence import FinishReason

SENTINELS = tuple(range(VOCAB_SIZE - 10, VOCAB_SIZE))
UNKNOWN, END = 2, 7


def blanks(number: int, max_tokens_per_blank: int | None = None) -> Blanks:
    return Blanks(SENTINELS[1 : number + 1], (*SENTINELS, UNKNOWN), max_tokens_per_blank)


def allowed(matcher: BlankMatcher) -> set[int]:
    return {token_id for token_id in range(VOCAB_SIZE) if matcher.allowed >> token_id & 1}


def test_the_form_step_by_step() -> None:
    matcher = BlankMatcher(blanks(2, max_tokens_per_blank=2), [END])
    text = set(range(VOCAB_SIZE)) - {*SENTINELS, UNKNOWN, END}
    assert allowed(matcher) == text | {SENTINELS[1]} and matcher.forced is None
    matcher.advance(20)
    assert allowed(matcher.after(21)) == {SENTINELS[1]} and matcher.after(21).forced == SENTINELS[1]
    matcher.advance(SENTINELS[1])
    assert allowed(matcher) == text | {SENTINELS[2], END}
    matcher.advance(SENTINELS[2])
    assert matcher.is_complete and matcher.forced is None
    matcher.retreat()
    assert not matcher.is_complete and allowed(matcher) == text | {SENTINELS[2], END}
    assert matcher.error == ""


def test_wrong_forms_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="closes a blank"):
        Blanks(())
    for closers, forbidden in (((-1,), ()), ((5,), (-1,))):
        with pytest.raises(InvalidParameter, match="below 0"):
            Blanks(closers, forbidden)
    with pytest.raises(InvalidParameter, match="max_tokens_per_blank is 0"):
        Blanks((5,), max_tokens_per_blank=0)
    with pytest.raises(InvalidParameter, match="grammar"):
        SamplingParams(blanks=blanks(1), grammar=Grammar.json_object())
    with pytest.raises(InvalidParameter, match="ignore_eos"):
        SamplingParams(blanks=blanks(1), ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("blanks") / "cpm-2"
    build("CPM-2", folder)
    with load(folder, max_model_len=200) as engine:
        yield engine


def ask(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Completion]:
    """Like Engine.generate(), with an answer that begins with the first sentinel."""
    found = {f"blank-{index}": Completion() for index in range(len(prompts))}
    for request_id, prompt, each in zip(found, prompts, params, strict=True):
        engine.add(GenerationRequest(prompt, each, request_id, answer_start=SENTINELS[:1]))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            found[output.request_id].extend(output)
    return list(found.values())


def test_random_answers_have_the_form_and_forced_tokens_change_nothing(engine: Engine) -> None:
    dice = random.Random(3)
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(24)]
    forms = [blanks(dice.randint(1, 9), dice.choice([1, 2, 5])) for _ in prompts]

    def params(**options: object) -> list[SamplingParams]:
        return [
            SamplingParams(temperature=3, seed=seed, max_tokens=60, blanks=form, **options)  # type: ignore[arg-type]
            for seed, form in enumerate(forms)
        ]

    before = engine.metrics.fast_forwarded_tokens
    fast = ask(engine, prompts, params())
    assert engine.metrics.fast_forwarded_tokens - before > 60
    plain = ask(engine, prompts, params(logprobs=0))
    assert [each.token_ids for each in fast] == [each.token_ids for each in plain]
    for form, answer in zip(forms, fast, strict=True):
        token_ids = answer.token_ids
        if answer.finish_reason is FinishReason.LENGTH:
            continue
        assert [token for token in token_ids if token in SENTINELS] == list(form.closers)
        assert token_ids[-1] == form.closers[-1] and UNKNOWN not in token_ids
        parts = "".join("|" if token in SENTINELS else "x" for token in token_ids).split("|")
        assert max(map(len, parts)) <= (form.max_tokens_per_blank or 0)


def test_beams_have_the_form_as_well(engine: Engine) -> None:
    form = blanks(3, max_tokens_per_blank=2)
    (best,) = ask(engine, PROMPTS[2:3], [SamplingParams(max_tokens=20, blanks=form, beams=BeamParams(4))])
    assert [token for token in best.token_ids if token in SENTINELS] == list(form.closers)
    assert best.finish_reason is FinishReason.STOP and best.token_ids[-1] == form.closers[-1]
    (alone,) = ask(engine, PROMPTS[2:3], [SamplingParams(temperature=0, max_tokens=20, blanks=form)])
    (one,) = ask(engine, PROMPTS[2:3], [SamplingParams(max_tokens=20, blanks=form, beams=BeamParams(1))])
    assert one.token_ids == alone.token_ids


def test_an_answer_start_is_no_part_of_the_answer(engine: Engine) -> None:
    """The answer is the one that follows when the start was written by the model itself."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    free = engine.generate([PROMPTS[2]], params)[0].token_ids
    engine.add(GenerationRequest(PROMPTS[2], params, "a", answer_start=tuple(free[:3])))
    found = Completion()
    while engine.has_work:
        for output in engine.step():
            found.extend(output)
    assert found.token_ids[:5] == free[3:]
    assert len(found.token_ids) == 8


def test_starts_that_cannot_be_computed(engine: Engine, tiny_llama: Path) -> None:
    params = SamplingParams(max_tokens=10)
    with pytest.raises(InvalidParameter, match="answer_start has a token id outside"):
        engine.validate(GenerationRequest([5], params, answer_start=(VOCAB_SIZE,)))
    for form in (Blanks((VOCAB_SIZE,)), Blanks((9,), (8, VOCAB_SIZE))):
        with pytest.raises(InvalidParameter, match="blanks has a token id above"):
            engine.validate(GenerationRequest([5], SamplingParams(blanks=form), answer_start=(3,)))
    engine.validate(GenerationRequest([5] * 188, params, answer_start=(3,)))
    with pytest.raises(ContextOverflow):
        engine.validate(GenerationRequest([5] * 189, params, answer_start=(3,)))
    with Engine.load(tiny_llama) as decoder, pytest.raises(InvalidParameter, match="with an encoder"):
        decoder.validate(GenerationRequest([5], params, answer_start=(3,)))
