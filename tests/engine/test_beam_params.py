"""Parameters of a request with beams: what is honoured, and what is refused by name. The oracle scores every
answer that is possible, one by one."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config import EngineConfig
from penstock.engine import Completion, Engine
from penstock.errors import InvalidParameter, NoTokenLeft, TooFewAnswers
from penstock.generation.beam_search import BeamParams
from penstock.generation.grammars.grammar import Grammar
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.sequence import FinishReason

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Engine]:
    with Engine.load(tiny_llama, EngineConfig(max_num_seqs=16, kv_cache_bytes=1 << 20)) as engine:
        yield engine


def search(engine: Engine, beams: BeamParams, **options: Any) -> list[Completion]:
    prompt = engine.tokenizer.encode(PROMPT)
    best = engine.generate([prompt], SamplingParams(beams=beams, **({"max_tokens": 12} | options)))[0]
    return [best, *best.others]


def logprob(engine: Engine, answer: list[int]) -> float:
    """Of a whole answer, by scoring prompt and answer as one prompt."""
    prompt = engine.tokenizer.encode(PROMPT)
    scores = engine.generate([prompt + answer], SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    assert scores.prompt_logprobs is not None
    return math.fsum(each.logprob for each in scores.prompt_logprobs[len(prompt) :] if each)


def test_the_best_of_all_answers_of_a_grammar_is_found(engine: Engine) -> None:
    """Ten beams hold all first digits, so that nothing is missed."""
    beams = BeamParams(10, 10, early_stopping="never")
    found = search(engine, beams, grammar=Grammar.regex("[0-9]{2}"))
    digits = [engine.tokenizer.encode(str(digit), add_special_tokens=False) for digit in range(10)]
    assert all(len(digit) == 1 for digit in digits)
    pairs = [first + second for first, second in itertools.product(digits, digits)]
    best = sorted(((logprob(engine, pair) / 2, pair) for pair in pairs), reverse=True)[:10]
    assert [each.token_ids for each in found] == [pair for _, pair in best]
    assert [each.score for each in found] == pytest.approx([score for score, _ in best], abs=1e-4)
    assert all(re.fullmatch("[0-9]{2}", each.text) for each in found)
    assert {each.finish_reason for each in found} == {FinishReason.STOP}


def test_scores_are_those_of_the_answers_and_log_probabilities_come_along(engine: Engine) -> None:
    for penalty in (0.0, 1.0, -2.0):
        for done in search(engine, BeamParams(4, 3, penalty), logprobs=2, stop_token_ids=(40, 60, 90)):
            total = math.fsum(each.logprob for each in done.logprobs)
            assert [each.token_id for each in done.logprobs] == done.token_ids
            assert all(len(each.top) == 2 for each in done.logprobs)
            assert total == pytest.approx(logprob(engine, done.token_ids), abs=1e-4)
            assert done.score == pytest.approx(total / len(done.token_ids) ** penalty)


def test_a_stop_string_ends_an_answer_and_is_cut_off(engine: Engine) -> None:
    free = search(engine, BeamParams(4, 4), max_tokens=8)
    stop = free[0].text[3:5]
    cut = search(engine, BeamParams(4, 4, early_stopping="never"), max_tokens=8, stop=(stop,))
    ended = [done for done in cut if done.finish_reason is FinishReason.STOP]
    assert ended and all(done.stop_reason == stop and stop not in done.text for done in ended)
    assert any(free[0].text.startswith(done.text) for done in ended)
    for done in cut:
        assert (stop in engine.tokenizer.decode(done.token_ids)) == (done in ended)
        assert done.score == pytest.approx(logprob(engine, done.token_ids) / len(done.token_ids), abs=1e-4)
    kept = search(
        engine,
        BeamParams(4, 4, early_stopping="never"),
        max_tokens=8,
        stop=(stop,),
        include_stop_str_in_output=True,
    )
    assert [done.token_ids for done in kept] == [done.token_ids for done in cut]
    assert any(done.text.endswith(stop) for done in kept)


def test_end_and_stop_tokens_end_an_answer(engine: Engine) -> None:
    (first, *_) = search(engine, BeamParams(3), max_tokens=5)
    token = first.token_ids[2]
    done = search(engine, BeamParams(3, 3, early_stopping=True), stop_token_ids=(token,))
    ended = [each for each in done if each.stop_reason == token]
    assert ended and all(each.token_ids[-1] == token and token not in each.token_ids[:-1] for each in ended)
    assert all(token not in each.token_ids[:6] for each in search(
        engine, BeamParams(3, 3), stop_token_ids=(token,), min_tokens=6))  # fmt: skip
    eos = next(iter(engine.tokenizer.eos_token_ids))
    lured = {"logit_bias": {eos: 30.0}}
    assert search(engine, BeamParams(2), **lured)[0].token_ids == [eos]
    assert len(search(engine, BeamParams(2), **lured, ignore_eos=True)[0].token_ids) == 12


def test_one_beam_with_early_stopping_is_greedy(engine: Engine) -> None:
    prompt = engine.tokenizer.encode(PROMPT)
    greedy = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=12))[0]
    (done,) = search(engine, BeamParams(1, early_stopping=True))
    assert (done.token_ids, done.text, done.finish_reason) == (
        greedy.token_ids,
        greedy.text,
        greedy.finish_reason,
    )


def test_prompt_log_probabilities_come_with_every_answer(engine: Engine) -> None:
    plain = engine.generate(
        [engine.tokenizer.encode(PROMPT)], SamplingParams(max_tokens=0, prompt_logprobs=1)
    )[0]
    for done in search(engine, BeamParams(3, 2), prompt_logprobs=1):
        assert done.prompt_logprobs == plain.prompt_logprobs


def test_fewer_answers_than_asked_for_are_an_error_that_says_so(engine: Engine) -> None:
    grammar = Grammar.regex("[ab]")
    assert {done.text for done in search(engine, BeamParams(4, 2), grammar=grammar)} == {"a", "b"}
    with pytest.raises(TooFewAnswers, match="allows 2 answers, and n asks for 3"):
        search(engine, BeamParams(4, 3), grammar=grammar)
    with pytest.raises(NoTokenLeft, match="allowed_token_ids and no_repeat_ngram_size leave no token"):
        search(engine, BeamParams(2), allowed_token_ids=(70, 71), no_repeat_ngram_size=1)
    assert not engine.has_work and engine.scheduler.block_manager.pool.num_free == engine.plan.num_kv_blocks


def test_an_aborted_search_frees_everything(engine: Engine) -> None:
    params = SamplingParams(beams=BeamParams(5, 2), max_tokens=30)
    for num_steps in (0, 1, 4):
        engine.add(GenerationRequest(engine.tokenizer.encode(PROMPT), params, "left"))
        assert not any(engine.step() for _ in range(num_steps)), "a search tells nothing before its end"
        assert engine.metrics.num_running <= 5
        engine.abort("left")
        assert not engine.has_work and engine.metrics.kv_blocks_used == 0
    engine.add(GenerationRequest(engine.tokenizer.encode(PROMPT), params, "late", finish_by=5.0))
    engine.step()
    engine.step()
    (told,) = engine.expire(6.0)
    assert "after 2 tokens" in str(told.error) and engine.metrics.kv_blocks_used == 0


@pytest.mark.parametrize(
    ("beams", "options", "param"),
    [
        ({}, {"temperature": 0.7}, "temperature"),
        ({}, {"top_p": 0.9}, "top_p"),
        ({}, {"top_k": 5}, "top_k"),
        ({}, {"min_p": 0.1}, "min_p"),
        ({}, {"max_tokens": 0}, "max_tokens"),
        ({"num_beams": 0}, {}, "best_of"),
        ({"num_answers": 5}, {}, "n"),
        ({"num_answers": 0}, {}, "n"),
        ({"length_penalty": math.nan}, {}, "length_penalty"),
        ({"length_penalty": 11.0}, {}, "length_penalty"),
        ({"early_stopping": "ever"}, {}, "early_stopping"),
        ({"num_beams": 17}, {}, "best_of"),
        ({"num_beams": 16}, {"max_tokens": 200}, "best_of"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    beams: dict[str, Any], options: dict[str, Any], param: str, engine: Engine
) -> None:
    with pytest.raises(InvalidParameter) as refused:
        params = SamplingParams(beams=BeamParams(**({"num_beams": 4} | beams)), **options)
        engine.validate(GenerationRequest([5] * 40, params))
    assert refused.value.param == param


def test_without_max_tokens_all_beams_get_what_there_is_room_for(tiny_llama: Path) -> None:
    config = EngineConfig(max_num_seqs=8, kv_cache_bytes=12 * 16 * 2 * 3 * 2 * 16 * 2)
    with Engine.load(tiny_llama, config) as engine:
        assert engine.plan.num_kv_blocks == 12
        params = SamplingParams(beams=BeamParams(4), ignore_eos=True)
        done = engine.generate([[5] * 20], params)[0]
        assert len(done.token_ids) == 3 * 16 - 20 and done.finish_reason is FinishReason.LENGTH
        with pytest.raises(InvalidParameter, match="4 beams of 20 tokens and 29 more do not fit"):
            engine.validate(GenerationRequest([5] * 20, SamplingParams(beams=BeamParams(4), max_tokens=29)))
