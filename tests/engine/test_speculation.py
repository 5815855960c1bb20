"""What is guessed from prompt and answer, how many guesses a step takes, and that no answer depends on it."""

from __future__ import annotations

import gc
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
from penstock.generation.drafting.acceptance import (
    OTHER_PLACE,
    Acceptance,
    kind_of_match,
    kind_of_rank,
    kind_of_share,
)
from penstock.generation.drafting.draft_tree import NO_GUESSES, DraftTree
from penstock.generation.drafting.drafter import NO_DRAFTS
from penstock.generation.drafting.guesses import Guesses
from penstock.generation.drafting.recycled_tokens import RecycledTokens
from penstock.generation.drafting.repeated_text import RepeatedText
from penstock.generation.drafting.speculation import Speculation
from penstock.generation.drafting.trial import Trial, TriedStep
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.sequence import Sequence
from penstock.metrics import StepStats

__all__ = ["undrafted"]  # a fixture


def flat_s(num_tokens: int) -> float:
    """Seconds of a step that waits for its layers."""
    return 1.0


def linear_s(num_tokens: int) -> float:
    """Seconds of a step that waits for its arithmetic."""
    return float(num_tokens)


def plain_guess(tokens: list[int], length: int) -> tuple[list[int], int]:
    """The same by brute force: all earlier places, the longest match, the latest of several."""
    best, most = 0, 0
    for place in range(1, len(tokens)):
        same = 0
        while (
            same < min(EngineConfig.prompt_lookup_max, place)
            and tokens[place - 1 - same] == tokens[-1 - same]
        ):
            same += 1
        if same and same >= most:
            best, most = place, same
    if not most:
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
        guesses = text.guesses(9)
        guess, num_same = guesses[0] if guesses else ((), 0)
        firsts = [each.token_ids[0] for each in guesses]
        assert len(set(firsts)) == len(firsts)
        assert [each.num_same for each in guesses] == sorted((g.num_same for g in guesses), reverse=True)
        expected, most = plain_guess(tokens, 9)
        # Only the latest places are looked at, so that a text of two words has better ones.
        assert num_same == most or (num_kinds == 2 and 0 < num_same < most)
        if num_same == most:
            assert list(guess) == expected


def test_an_example_is_guessed_where_the_answer_follows_it() -> None:
    text = RepeatedText([5, 6, 7, 8, 9])
    text.follow([1])
    assert text.guesses(3) == []
    text.follow([1, 6, 7])
    (found,) = text.guesses(9)
    assert found.token_ids == (8, 9)  # and nothing beyond the example's end
    text.follow([1, 6, 7, 9])
    assert text.guesses(9) == []


def test_other_places_are_guessed_too() -> None:
    text = RepeatedText()
    text.follow([1, 2, 3, 7, 0, 2, 3, 8, 0, 1, 2, 3])
    assert [(each.token_ids, each.num_same) for each in text.guesses(2)] == [((7, 0), 3), ((8, 0), 2)]


def test_the_last_token_alone_counts_where_no_pair_is_the_same() -> None:
    text, tokens = RepeatedText(), [1, 2, 3, 4, 2, 5, 0, 2]
    text.follow(tokens)
    assert [(each.token_ids, each.num_same) for each in text.guesses(2)] == [((5, 0), 1), ((3, 4), 1)]
    assert text.behind([9, 2], 2) == [], "what another text says next is not guessed from one token"
    only_pairs = RepeatedText(config=EngineConfig(prompt_lookup_min=2))
    only_pairs.follow(tokens)
    assert only_pairs.guesses(2) == []


def test_a_guess_behind_right_ones_is_trusted_like_a_longer_match() -> None:
    mine = sequence([1, 2])
    each = Guesses(mine, Acceptance(), 0.0)
    each.add_chain([3, 4, 5], 1)
    each.add_chain([6, 7], 2, OTHER_PLACE)
    assert each.kinds == [kind_of_match(1), kind_of_match(2), kind_of_match(3), OTHER_PLACE, kind_of_match(3)]
    rates = [Acceptance().rate(kind) for kind in each.kinds]
    assert each.chances == pytest.approx(
        [rates[0], rates[0] * rates[1], math.prod(rates[:3]), rates[3], rates[3] * rates[4]]
    )


def sequence(prompt: list[int], **params: object) -> Sequence:
    return Sequence(0, GenerationRequest(prompt, SamplingParams(**params)), 1000)  # type: ignore[arg-type]


def proposed(predict_s: Callable[[int], float], sequences: list[Sequence], room: int = 500) -> list[int]:
    """How many guesses each sequence gets."""
    found = Speculation(predict_s).propose(sequences, len(sequences), room)
    return [found.get(each, NO_GUESSES).num_nodes for each in sequences]


def test_guesses_are_taken_where_they_pay() -> None:
    quotation, prose = [*range(20), *range(18)], [1, 2, 3, 1, 2]
    assert proposed(flat_s, [sequence(quotation)]) == [EngineConfig.max_guesses]
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


def test_limits_of_guesses_are_those_of_the_config() -> None:
    quotation = sequence([*range(20), *range(18)])
    few = Speculation(flat_s, config=EngineConfig(max_guesses=5))
    assert few.propose([quotation], 1, 500)[quotation].num_nodes == 5
    text = [7, 1, 2, 3, 8, 0, 9, 2, 3]
    for least, most, expected in ((2, 32, 2), (3, 32, None), (2, 2, 2)):
        found = RepeatedText(config=EngineConfig(prompt_lookup_min=least, prompt_lookup_max=most))
        found.follow(text)
        assert [each.num_same for each in found.guesses(1)] == ([expected] if expected else [])
    cut = RepeatedText(config=EngineConfig(prompt_lookup_max=3))
    cut.follow([*range(9), *range(8)])
    assert [each.num_same for each in cut.guesses(1)] == [3]


class Machine:
    """Steps of one sequence, whose text repeats itself or does not, and what a step takes."""

    def __init__(self, take_s: Callable[[int], float], predict_s: Callable[[int], float]) -> None:
        self.take_s, self.last_step = take_s, None
        self.speculation = Speculation(predict_s, last_step=lambda: self.last_step)
        self.sequence, self.dice = sequence([*range(20), *range(18)]), random.Random(0)
        self.seconds = 0.0

    def step(self, is_quoted: bool) -> int:
        """Returns how many guesses it had."""
        mine, num_right = self.sequence, 0
        guess = self.speculation.propose([mine], 1, 500).get(mine, NO_GUESSES)
        if is_quoted:
            text = [(mine.token_ids[-1] + number) % 20 for number in range(1, 50)]
            num_right = len(guess.follow(text))
            mine.token_ids += text[: num_right + 1]
        else:
            mine.append(self.dice.randrange(100, 10**9))
            mine.token_ids += range(18)  # after which something else stood each time
        seconds = self.take_s(1 + guess.num_nodes)
        self.seconds += seconds
        self.last_step = StepStats(
            duration_s=seconds, num_tokens=1 + guess.num_nodes, num_seqs=1, num_sampled=1 + num_right,
            num_fast_forwarded=0, num_drafts=guess.num_nodes, num_right_drafts=num_right, streamed_bytes=0,
            stall_s=0.0, floor_s=0.0, predicted_s=0.0,
        )  # fmt: skip
        return guess.num_nodes


def dear_s(num_tokens: int) -> float:
    """A step whose guesses take far longer than linearly predicted."""
    return 1.0 if num_tokens == 1 else 3 + 0.3 * num_tokens


def cheap_s(num_tokens: int) -> float:
    return 0.95 + 0.05 * num_tokens


def test_wrong_guesses_become_rare_and_cost_little() -> None:
    """What follows a long match is wrong each time. Nobody has to compute a guess to see that."""
    machine = Machine(cheap_s, cheap_s)
    sizes = [machine.step(False) for _ in range(300)]
    assert sizes[0] == 0 and sum(sizes) > 0
    for count in (32, 300):
        assert sum(cheap_s(1 + size) - 1 for size in sizes[:count]) <= 0.03 * count


def test_right_guesses_are_taken_after_a_trial() -> None:
    machine = Machine(cheap_s, cheap_s)
    sizes = [machine.step(True) for _ in range(30)]
    assert sizes[0] == 0, "a step without guesses is measured first"
    assert 0 < sum(size == 0 for size in sizes) < 8 and all(sizes[8:])
    assert len(machine.sequence.token_ids) - 38 > 3 * machine.seconds


def test_guesses_that_take_longer_than_predicted_stop_and_are_tried_again() -> None:
    machine = Machine(dear_s, cheap_s)
    sizes = [machine.step(False) or machine.step(True) for _ in range(300)]
    drafted = [number for number, size in enumerate(sizes) if size]
    assert drafted and len(drafted) < 60
    machine.take_s = cheap_s  # the machine has nothing else to do now
    assert any([machine.step(True) for _ in range(70)][-3:]), "a pause has at most 64 steps"


def test_a_trial_takes_turns_and_decides_by_what_steps_took() -> None:
    trial, plain = Trial(), TriedStep(1, 1.0)
    turns = list[bool]()
    for _ in range(9):
        turns.append(trial.may_draft)
        trial.record(TriedStep(1.5, 1.6, 1.2) if turns[-1] else plain, turns[-1])
    assert turns == [False, True] * 4 + [False], "1.5 tokens in the time of 1.6 steps"
    assert trial.price == pytest.approx(1.6 / 1.2)
    pauses = list[int]()
    for _ in range(5):
        pauses.append(0)
        while not trial.may_draft:
            trial.record(plain, False)
            pauses[-1] += 1
        for _ in range(4):
            trial.record(TriedStep(1.5, 1.6), True)
    assert pauses == [7, 16, 32, 64, 64]
    while not trial.may_draft:
        trial.record(plain, False)
    for number in range(20):
        trial.record(TriedStep(3, 90.0 if number == 9 else 1.5), True)
        assert trial.may_draft, "one step was slow by accident"
    for _ in range(8):
        trial.record(TriedStep(1, 1.5), True)
    assert not trial.may_draft, "the text repeats nothing any more"
    for _ in range(8):
        trial.record(plain, False)
    assert trial.may_draft, "they paid before, so that the pause is short"


def test_rates_follow_what_was_seen() -> None:
    acceptance, kind = Acceptance(), kind_of_match(5)
    first = acceptance.rate(kind)
    for _ in range(120):
        acceptance.learn(kind, True)
    assert acceptance.rate(kind) > 0.9 > first
    assert acceptance.rate(kind_of_match(2)) == Acceptance().rate(kind_of_match(2))
    assert Acceptance(acceptance).rate(kind) == acceptance.rate(kind)
    for _ in range(100):
        acceptance.learn(kind, False)
    assert acceptance.rate(kind) < 0.1
    for _ in range(2000):
        acceptance.forget([kind])
    assert math.isclose(acceptance.rate(kind), first, rel_tol=0.01)
    kinds = [kind_of_match(2), kind_of_match(99), kind_of_share(0.0), kind_of_share(1.0), kind_of_rank(0)]
    assert len({kind_of_share(share / 100) for share in range(101)} | set(kinds)) == 13, "kinds are apart"


def test_a_tree_keeps_what_leads_to_its_nodes() -> None:
    tree = DraftTree((1, 2, 3, 4, 5, 6), (-1, -1, 0, 1, 2, 0))
    assert tree.depths == [1, 1, 2, 2, 3, 2] and tree.path(4) == [0, 2, 4]
    assert tree.follow([1, 3, 5, 9]) == [0, 2, 4] and tree.follow([3]) == []
    assert tree.within(4, 9) == DraftTree((1, 2, 3, 4), (-1, -1, 0, 1))
    assert tree.within(9, 1) == DraftTree((1, 2), (-1, -1))
    runs = tree.in_runs()
    assert runs == DraftTree((1, 3, 5, 6, 2, 4), (-1, 0, 1, 0, -1, 4))
    assert runs.runs == [range(3), range(3, 4), range(4, 6)]
    chain = DraftTree.chain([7, 8])
    assert chain.in_runs() is chain and chain.runs == [range(2)] and DraftTree().runs == []


def test_what_was_likely_before_is_guessed_again() -> None:
    """A tree of the likely followers, the likeliest first; a text with a salt leaves nothing for others."""
    speculation, first = Speculation(flat_s), sequence([1, 2, 3])
    speculation.propose([first], 1, 500)
    assert speculation.num_followers
    speculation.learn(first, NO_GUESSES, [], [(4, 5, 6)])
    first.append(4)
    speculation.learn(first, NO_GUESSES, [], [(3, 7)])
    second = sequence([9, 3])
    tree = speculation.propose([second], 1, 500)[second]
    assert set(zip(*tree, strict=True)) >= {(4, -1), (5, -1)}
    assert tree.token_ids[tree.parents.index(tree.token_ids.index(4))] == 3
    salted = Sequence(1, GenerationRequest([9, 8], SamplingParams(), cache_salt="own"), 1000)
    speculation.learn(salted, NO_GUESSES, [], [(99,)])
    other = sequence([9, 8])
    assert speculation.propose([other], 1, 500) == {}


def test_a_kind_that_is_right_too_rarely_is_not_tried_until_it_would_be_right() -> None:
    """What follows the same two tokens is another token each time, and later the same."""
    no_lookup = EngineConfig(prompt_lookup_min=32)
    speculation, mine = Speculation(flat_s, config=no_lookup), sequence([1, 2, 3], max_tokens=9000)
    sizes = []
    for number in range(440):
        guess = speculation.propose([mine], 1, 500).get(mine, NO_GUESSES)
        sizes.append(guess.num_nodes)
        speculation.learn(mine, guess, [], [(4,)] if not guess else [(4,), (5,)])
        mine.token_ids += [100 + number if number < 400 else 4, 2, 3]
    assert sizes[1] and not any(sizes[100:400]) and all(sizes[-9:])


def test_what_was_likely_behind_two_tokens_comes_before_what_was_behind_one() -> None:
    recycled = RecycledTokens()
    recycled.learn(1, 2, (3,))
    recycled.learn(9, 2, (4,))
    assert recycled.followers(1, 2) == ((3,), True)
    assert recycled.followers(5, 2) == ((4,), False)
    assert recycled.followers(5, 6) == ((), False)


def test_a_predicted_answer_is_guessed_from_its_first_token() -> None:
    speculation, expected = Speculation(flat_s), tuple(range(100, 140))
    mine = sequence([5, 9, 20], prediction=expected)
    for number in range(4):
        assert speculation.propose([mine], 1, 500)[mine].token_ids[:2] == expected[number : number + 2]
        mine.append(expected[number])
    other = sequence([5, 9, 20], prediction=expected)
    other.append(7)
    assert speculation.propose([other], 1, 500) == {}


def test_a_sequence_that_ended_leaves_nothing() -> None:
    speculation = Speculation(flat_s)
    sequences = [sequence([*range(20), *range(number)]) for number in range(5, 18)]
    assert speculation.propose(sequences, len(sequences), 500)
    del sequences
    gc.collect()
    assert not speculation._tracks


def test_a_kind_comes_back_as_fast_in_company() -> None:
    rates = []
    for count in (1, 8):
        speculation = Speculation(lambda n: 1 + 0.5 * n)  # guesses that rarely come true don't pay
        kind = kind_of_match(5)
        for _ in range(40):
            speculation._acceptance.learn(kind, False)
        sequences = [sequence([1, 2, 3, 4, 5, 30 + n, 1, 2, 3, 4, 5]) for n in range(count)]
        for _ in range(10):
            assert speculation.propose(sequences, count, 500) == {}
        rates.append(speculation._acceptance.rate(kind))
    assert rates[0] == rates[1]


def test_earlier_texts_are_guessed_from_under_the_same_salt() -> None:
    speculation = Speculation(flat_s)

    def guessed(salt: str | None, prompt: list[int]) -> tuple[int, ...]:
        asked = Sequence(1, GenerationRequest(prompt, SamplingParams(), cache_salt=salt), 1000)
        return speculation.propose([asked], 1, 500).get(asked, NO_GUESSES).token_ids

    assert guessed("own", [*range(20, 60)]) == ()
    assert guessed("own", [7, 8, 30, 31, 32])[:3] == (33, 34, 35)
    assert guessed("other", [7, 8, 30, 31, 32]) == guessed(None, [7, 8, 30, 31, 32]) == ()
    assert guessed(None, [7, 8, 30, 31, 32]) == ()


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


def test_a_guess_that_a_model_does_not_name_is_less_likely() -> None:
    """By Bayes' rule, and its followers with it. What the model names stays, and so does all elsewhere."""
    sequence = Sequence(0, GenerationRequest([1, 2, 3], SamplingParams()), 100)
    guesses = Guesses(sequence, Acceptance(), 0.0)
    guesses.add_chain([7, 8, 9], 4)
    guesses.add(-1, 5, kind_of_share(0.6))
    before, named, rate = list(guesses.chances), 3, 0.8
    guesses.doubt(-1, [5, 6], rate)
    # Of 10,000 texts, those in which the guess is right and none of the model's is, of all of the latter.
    right = before[0] * (1 - rate)
    assert guesses.chances[0] == pytest.approx(right / (right + 1 - before[0]))
    for node in (1, 2):
        assert guesses.chances[node] / before[node] == pytest.approx(guesses.chances[0] / before[0])
    assert guesses.chances[named] == before[named]
    before = list(guesses.chances)
    guesses.doubt(1, [4], rate)
    assert guesses.chances[:2] == before[:2] and guesses.chances[2] < before[2]
