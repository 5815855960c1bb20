"""What is guessed from prompt and answer, how many guesses a step takes, and that no answer depends on it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from test_drafts import ASKED_PARAMS, ASKED_PROMPTS, CONFIGS, check_all_is_free, undrafted
from test_engine import exact

from penstock.config import EngineConfig
from penstock.engine import Completion, Engine
from penstock.errors import InvalidParameter
from penstock.generation.drafting.acceptance import Acceptance
from penstock.generation.drafting.drafter import NO_DRAFTS
from penstock.generation.drafting.repeated_text import MAX_MATCH, MIN_MATCH, RepeatedText
from penstock.generation.drafting.speculation import MAX_GUESSES, Speculation
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.sequence import Sequence

__all__ = ["undrafted"]  # a fixture


def flat_s(num_tokens: int) -> float:
    """Seconds of a step that waits for its layers."""
    return 1.0


def linear_s(num_tokens: int) -> float:
    """Seconds of a step that waits for its arithmetic."""
    return float(num_tokens)


def plain_guess(tokens: list[int], length: int) -> tuple[list[int], int]:
    """The same by brute force: all earlier places, the longest match, the latest of several."""
    best, most = 0, MIN_MATCH - 1
    for place in range(MIN_MATCH, len(tokens)):
        same = 0
        while same < min(MAX_MATCH, place) and tokens[place - 1 - same] == tokens[-1 - same]:
            same += 1
        if same >= MIN_MATCH and same >= most:
            best, most = place, same
    if most < MIN_MATCH:
        return [], 0
    period = len(tokens) - best
    return [tokens[best + offset % period] for offset in range(length)], most


@pytest.mark.parametrize("num_kinds", [2, 5, 40])
def test_guesses_are_those_of_brute_force(num_kinds: int) -> None:
    dice = random.Random(num_kinds)
    text, tokens = RepeatedText(), list[int]()
    for _ in range(60):
        tokens += [dice.randrange(num_kinds) for _ in range(dice.choice((1, 1, 3)))]
        text.follow(tokens)
        guess, num_same = text.guess(9)
        expected, most = plain_guess(tokens, 9)
        # Only the latest places are looked at, so that a text of two words has better ones.
        assert num_same == most or (num_kinds == 2 and 0 < num_same < most)
        if num_same == most:
            assert list(guess) == expected


def test_an_example_is_guessed_from_its_beginning_and_where_the_answer_follows_it() -> None:
    text = RepeatedText([5, 6, 7, 8, 9])
    assert text.guess(3).token_ids == (5, 6, 7)
    text.follow([1, 6])
    assert text.guess(3).token_ids == ()
    text.follow([1, 6, 7])
    assert text.guess(9).token_ids == (8, 9)  # and nothing beyond the example's end


def sequence(prompt: list[int], **params: object) -> Sequence:
    return Sequence(0, GenerationRequest(prompt, SamplingParams(**params)), 1000)  # type: ignore[arg-type]


def proposed(predict_s: Callable[[int], float], sequences: list[Sequence], room: int = 500) -> list[int]:
    """How many guesses each sequence gets."""
    found = Speculation(predict_s).propose(sequences, len(sequences), room)
    return [len(found.get(each, ())) for each in sequences]


def test_guesses_are_taken_where_they_pay() -> None:
    quotation, prose = [*range(20), *range(18)], [1, 2, 3, 1, 2]
    assert proposed(flat_s, [sequence(quotation)]) == [MAX_GUESSES]
    assert 0 < proposed(flat_s, [sequence(prose)])[0] < 5
    assert proposed(flat_s, [sequence([1, 2, 3])]) == [0]
    # A step of two tokens takes twice as long: no guess brings as much as it costs.
    assert proposed(linear_s, [sequence(quotation)]) == [0]
    assert proposed(lambda num_tokens: 0.0, [sequence(quotation)]) == [0]  # nothing is known
    assert proposed(flat_s, [sequence(quotation, speculation=False)]) == [0]
    # Twenty guesses are free: the quotation gets more of them than the prose.
    many = proposed(lambda n: max(1.0, n / 22), [sequence(quotation), sequence(prose)])
    assert many[0] > many[1] > 0 and sum(many) <= 20
    assert proposed(flat_s, [sequence(quotation)], room=3) == [3]


def test_wrong_guesses_become_rare_and_are_tried_again_later() -> None:
    prompt = [*range(20), *range(18)]
    mine = sequence(prompt)
    speculation = Speculation(lambda n: 1 + 0.05 * n)
    sizes = []
    for _ in range(300):
        guess = tuple(speculation.propose([mine], 1, 500).get(mine, ()))
        sizes.append(len(guess))
        if guess:
            speculation.learn(mine, guess, 0)
    assert sizes[0] > 8 and sum(sizes[30:60]) < 20
    # Each guess lengthens a step by a twentieth: the last 200 steps lose less than a hundredth.
    assert 0 < sum(sizes[100:]) < 40


def test_rates_follow_what_was_seen() -> None:
    acceptance = Acceptance()
    first = acceptance.rate(5)
    for _ in range(30):
        acceptance.learn(5, 4, 4)
    assert acceptance.rate(5) > 0.9 > first
    assert acceptance.rate(2) == Acceptance().rate(2)
    assert Acceptance(acceptance).rate(5) == acceptance.rate(5)
    for _ in range(100):
        acceptance.learn(5, 0, 4)
    assert acceptance.rate(5) < 0.1
    for _ in range(2000):
        acceptance.forget(5)
    assert math.isclose(acceptance.rate(5), first, rel_tol=0.01)


@pytest.mark.parametrize("case", CONFIGS)
def test_answers_are_those_without_speculation(
    case: str, tiny_llama: Path, undrafted: list[Completion]
) -> None:
    """Half of the requests say what they expect, and are right up to a token."""
    dice = random.Random(case)
    params = []
    for index, each in enumerate(ASKED_PARAMS):
        expected = list(undrafted[index].token_ids)
        if expected and index % 2:
            expected[dice.randrange(len(expected))] = 3
            each = SamplingParams(**(vars(each) | {"prediction": tuple(expected)}))
        params.append(each)
    config = EngineConfig(**CONFIGS[case])  # type: ignore[arg-type]
    with Engine.load(tiny_llama, config, drafter=Speculation(flat_s)) as engine:
        assert exact(engine.generate(ASKED_PROMPTS, params)) == exact(undrafted)
        check_all_is_free(engine)
        metrics = engine.metrics
        assert 0 < metrics.accepted_tokens < metrics.draft_tokens
        assert metrics.accepted_by_place[0] >= metrics.accepted_by_place[1] > 0
        assert metrics.draft_chains >= metrics.accepted_by_place[0]


def test_a_predicted_answer_takes_few_steps(tiny_llama: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with Engine.load(tiny_llama, drafter=Speculation(flat_s)) as engine:
        (plain,) = engine.generate([[5, 9, 20]], SamplingParams(**(vars(params) | {"speculation": False})))
        assert engine.metrics.num_steps == 60 and engine.metrics.draft_tokens == 0
        told = SamplingParams(**(vars(params) | {"prediction": tuple(plain.token_ids)}))
        assert engine.generate([[5, 9, 20]], told) == [plain]
        assert engine.metrics.num_steps - 60 <= 12
        with pytest.raises(InvalidParameter, match="prediction"):
            engine.generate([[5]], SamplingParams(prediction=(10**6,)))


def test_who_asks_for_none_gets_none(tiny_llama: Path) -> None:
    with Engine.load(tiny_llama, EngineConfig(speculation="off")) as engine:
        assert engine.scheduler._drafter is NO_DRAFTS
