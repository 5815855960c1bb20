"""Which of several drafters guesses: never much slower than the best of them, and no answer depends on it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_draft_model import flat_s, other
from test_drafts import ASKED_PARAMS, ASKED_PROMPTS, CONFIGS, check_all_is_free, undrafted
from test_engine import exact
from test_two_levels import two_levels

from penstock.config import EngineConfig
from penstock.engine import Completion, Engine
from penstock.generation.drafting.expectation import Assumed
from penstock.generation.drafting.speculation import Speculation
from penstock.generation.drafting.ways import Trials, Ways

__all__ = ["other", "undrafted"]  # fixtures

#: What ways really are: the chance of a next right guess, the most guesses, and a step's time with them.
Truth = list[tuple[float, int, float]]
DRAFT, PLANES, BOTH = (0.76, 8, 1.3), (0.92, 8, 2.0), (0.92, 10, 1.9)
#: Nothing is gained, and a step takes four times as long.
BAD = (0.05, 8, 4.0)
CASES: dict[str, Truth] = {
    "the first is best": [DRAFT, BAD, (0.5, 8, 1.5)],
    "the last is best": [(0.5, 8, 1.5), BAD, DRAFT],
    "nearly equal": [(0.76, 8, 1.3), (0.77, 8, 1.35), (0.75, 8, 1.28)],
    "planes": [BOTH, PLANES, DRAFT],
    "none is of use": [(0.0, 8, 1.02), (0.02, 8, 1.2), (0.01, 8, 1.6)],
}


def plain_rate(chance: float, most: int, spent: float) -> float:
    """Tokens in a plain step's time, by the sum of a chain's chances."""
    return sum(chance**level for level in range(most + 1)) / spent


def gained(dice: random.Random, chance: float, most: int) -> int:
    count = 1
    while count <= most and dice.random() < chance:
        count += 1
    return count


@pytest.mark.parametrize("hopes", ["right", "wrong", "equal"])
@pytest.mark.parametrize("case", CASES)
def test_answers_take_hardly_longer_than_with_the_best_way(case: str, hopes: str) -> None:
    """Whatever was expected: where that is wrong, behind a hundred steps. Prices and chances are invented."""
    truth = CASES[case]
    rates = [plain_rate(*each) for each in truth]
    expected = {"right": rates, "wrong": rates[::-1], "equal": [2.0] * len(rates)}[hopes]
    seconds = tokens = 0.0
    for seed in range(6):
        dice, trials = random.Random(seed), Trials(expected)
        for step in range(500):
            way = trials.pick()
            chance, most, spent = truth[way]
            num_gained = gained(dice, chance, most)
            trials.learn(way, num_gained, spent)
            if hopes == "right" or step >= 100:
                tokens, seconds = tokens + num_gained, seconds + spent
    assert tokens / seconds > (0.96 if hopes == "right" else 0.93) * max(rates)


def test_a_way_that_became_better_is_found() -> None:
    dice, trials = random.Random(1), Trials([3.0, 2.0])
    ways = list[int]()
    for step in range(900):
        way = trials.pick()
        chance = (0.8, 0.3)[way] if step < 300 else (0.3, 0.8)[way]
        trials.learn(way, gained(dice, chance, 8), 1.5)
        ways.append(way)
    assert sum(ways[:300]) < 40
    assert sum(ways[-300:]) > 260


class Paper:
    """A drafter that is a price."""

    voice, spent_s = 0, 0.0

    def __init__(self, rate: float, level_s: float) -> None:
        self.assumed = Assumed("paper", (rate,), lambda num_places: level_s)


def ways_of(*papers: Any) -> Ways:
    return Ways(papers, flat_s, EngineConfig())


def test_at_first_the_way_that_should_bring_most_guesses() -> None:
    good, dear, poor = Paper(0.8, 0.01), Paper(0.9, 0.5), Paper(0.3, 0.01)
    for papers in ([good, dear, poor], [poor, dear, good]):
        assert ways_of(*papers).pick(1) is good
    twin = Paper(0.8, 0.01)
    assert ways_of(good, twin).pick(1) is good, "of two that should bring the same, the first one"


def step(ways: Ways, num_sampled: int, num_right: int, drafting_s: float, is_done: bool = True) -> Any:
    picked = ways.pick(num_sampled)
    picked.spent_s += drafting_s  # type: ignore[misc]
    ways.guessed(num_sampled, num_sampled, 4)
    if is_done:
        for number in range(num_sampled):
            ways.learn(num_right if number == 0 else 0)
    return picked


def test_what_guesses_took_counts_as_measured() -> None:
    """Not as expected."""
    cheap, dear = Paper(0.7, 0.01), Paper(0.75, 0.01)
    ways = ways_of(cheap, dear)
    picked = [step(ways, 1, 3, 3.0 if ways.pick(1) is dear else 0.01) for _ in range(60)]
    assert picked[0] is dear and picked.count(dear) < 20 and picked[-1] is cheap


def test_a_step_that_was_cancelled_says_nothing() -> None:
    ways = ways_of(Paper(0.8, 0.01), Paper(0.7, 0.01))
    first = step(ways, 1, 0, 50.0, is_done=False)
    assert ways.pick(1) is first


def test_steps_of_many_sequences_are_apart() -> None:
    one, other_one = Paper(0.8, 0.01), Paper(0.78, 0.01)
    ways = ways_of(one, other_one)
    for _ in range(30):
        step(ways, 1, 0, 5.0 if ways.pick(1) is one else 0.0)
    assert step(ways, 1, 3, 0.0) is other_one
    assert step(ways, 8, 3, 0.0) is one


@pytest.mark.parametrize("case", ["alone", "together", "streamed"])
def test_answers_are_those_without_guesses(
    case: str, tiny_llama: Path, other: Path, undrafted: list[Completion]
) -> None:
    """Whichever way guesses, and however often it changes."""
    config = {"num_resident_layers": 3} if case == "streamed" else CONFIGS.get(case, {})
    with two_levels(tiny_llama, other, **config) as (engine, found):
        picked = set[int]()
        speculation = Speculation(flat_s, found, rivals=found.rivals)
        assert speculation._ways is not None
        number = iter(range(10**6))

        def pick(trials: Trials) -> int:
            picked.add(way := next(number) // 2 % 3)
            return way

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trials, "pick", pick)
            engine.scheduler._drafter = speculation
            for _ in range(2):
                assert exact(engine.generate(ASKED_PROMPTS, ASKED_PARAMS)) == exact(undrafted)
                check_all_is_free(engine)
        assert picked == {0, 1, 2} and engine.metrics.accepted_tokens
        found.small._forget()
        blocks = found.small._blocks
        assert blocks.pool.num_free == blocks.num_blocks


def test_an_engine_with_both_has_the_choice(tiny_llama: Path, other: Path) -> None:
    both = EngineConfig(weights="planes", draft_with_planes=True, draft_model=str(other))
    for config, num_ways in ((both, 3), (replace(both, draft_with_planes=False), 0)):
        with Engine.load(tiny_llama, config) as engine:
            drafter = engine.scheduler._drafter
            assert isinstance(drafter, Speculation)
            assert (len(drafter._ways._rivals) if drafter._ways is not None else 0) == num_ways


def test_a_way_that_began_unluckily_is_tried_again() -> None:
    """Beside a cheap one, whose tries must not take all that is kept for tries."""
    trials, num_tries, ways = Trials([2.0, 3.0, 1.9]), 0, list[int]()
    for _ in range(2000):
        way = trials.pick()
        num_tries += way == 1
        unlucky = way == 1 and num_tries <= 4
        trials.learn(way, 1 if unlucky else (3, 6, 2)[way], 4.0 if unlucky else 1.5)
        ways.append(way)
    assert ways[-200:].count(1) > 180
