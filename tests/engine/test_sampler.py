"""The sampler against transformers' processors, plain loops and float64."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.errors import ComputationError, NoTokenLeft, RequestFailed
from penstock.generation.chosen import SampledToken
from penstock.generation.distribution import FIRST_CANDIDATES, draw, token_logprobs
from penstock.generation.drafting.draft_tree import DraftTree
from penstock.generation.grammars.blanks import BlankMatcher, Blanks
from penstock.generation.likely_followers import BLOCK, likely_followers
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.sampler import Sampler, tokens_that_repeat
from penstock.generation.scheduling.batch import Batch, ScheduledSequence
from penstock.generation.sequence import Sequence

GREEDY = SamplingParams(temperature=0)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_logits(*shape: int, seed: int = 0, scale: float = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("size", [5, 64, 8 * BLOCK, 9 * BLOCK, 9 * BLOCK + 1, 20 * BLOCK + 63])
def test_likely_followers_are_those_of_topk(size: int) -> None:
    """With the likeliest tokens of a row in one block, in the last one, and behind it."""
    logits = random_logits(6, size)
    for row, place in enumerate((0, size // 2, size - 3)):
        logits[row, max(0, place - 4) : place + 5] += 50
    found = likely_followers(logits, 8)
    assert [list(row) for row in found] == logits.topk(min(8, size)).indices.tolist()


def sequence(params: SamplingParams, prompt: list[int], output: list[int]) -> Sequence:
    made = Sequence(0, GenerationRequest(prompt, params), 1000)
    for token_id in output:
        made.append(token_id)
    return made


def sample(sampler: Sampler, logits: Tensor, rows: list[Sequence]) -> list[SampledToken | RequestFailed]:
    """A row for each sequence."""
    batch = Batch(tuple(ScheduledSequence.of(row, row.num_pending_tokens) for row in rows))
    return [each.error or each.tokens[0] for each in sampler.choose([logits], batch)]


def choose(
    logits: Tensor, params: SamplingParams, prompt: list[int], output: list[int], eos: int = 0
) -> SampledToken:
    sampler = Sampler(logits.shape[-1], frozenset([eos]))
    (token,) = sample(sampler, logits[None], [sequence(params, prompt, output)])
    assert isinstance(token, SampledToken)
    return token


def transformers_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """By transformers' own processors, in the order of its generate()."""
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    ids, scores = torch.zeros(1, 1, dtype=torch.long), logits[None].double()
    scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores[0].softmax(-1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 5.0},
        {"top_k": 1},
        {"top_k": 4},
        {"top_k": 100},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 0.01},
        {"top_p": 0.6},
        {"top_p": 0.999},
        {"min_p": 0.15},
        {"min_p": 1.0},
        {"temperature": 1.7, "top_k": 7, "top_p": 0.8, "min_p": 0.2},
        {"temperature": 0.8, "top_p": 0.7, "min_p": 0.05},
    ],
)
def test_draws_follow_the_distribution_of_transformers(options: dict[str, float]) -> None:
    """By chi-square, over draws of one seed."""
    params, count = SamplingParams(**options), 3000  # type: ignore[arg-type]
    logits = random_logits(13, seed=1)
    counts = Counter(draw(logits, params, 7, index) for index in range(count))
    expected = transformers_probabilities(logits, params)
    assert set(counts) <= set(expected.nonzero().flatten().tolist())
    # Tokens that are hardly ever drawn are counted together.
    rare = sum(p for p in expected.tolist() if p * count < 5)
    rarely = sum(counts[token_id] for token_id, p in enumerate(expected.tolist()) if p * count < 5)
    cells = [(counts[i], p) for i, p in enumerate(expected.tolist()) if p * count >= 5] + [(rarely, rare)]
    assert sum((seen - p * count) ** 2 / (p * count) for seen, p in cells if p) < LIMIT
    assert rarely <= 5 * len(logits)


def split_mix(x: np.ndarray) -> np.ndarray:
    """The mixing function of SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(seed: int, index: int, token_ids: np.ndarray) -> np.ndarray:
    """The random numbers of tokens, in (0, 1): a stream of SplitMix64 for each (seed, index)."""
    golden = np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
    stream = split_mix(split_mix(np.array([seed & (2**64 - 1)], np.uint64)) + np.uint64(index + 1) * golden)
    bits = split_mix(stream + (token_ids.astype(np.uint64) + np.uint64(1)) * golden) >> np.uint64(12)
    return (bits.astype(np.float64) + 0.5) / 2.0**52


def plain_draw(logits: Tensor, temperature: float, seed: int, index: int) -> int:
    """All logarithms of all tokens."""
    u = uniform(seed, index, np.arange(len(logits)))
    scores = (logits.double().numpy() - float(logits.max())) / temperature
    return int((scores - np.log(-np.log(u))).argmax())


@pytest.mark.parametrize("scale", [0.05, 1.0, 4.0, 30.0])
def test_few_logarithms_give_what_all_give(scale: float) -> None:
    """Also where an unlikely token wins: with a scale of 4, most tokens lie far below the likeliest."""
    logits = random_logits(20_000, scale=scale)
    logits[:50] = -torch.inf
    for index in range(60):
        for temperature in (0.3, 1.0, 2.5):
            mine = draw(logits, SamplingParams(temperature=temperature), 3, index)
            assert mine == plain_draw(logits, temperature, 3, index)


def test_an_unlikely_token_is_drawn_as_often_as_it_should() -> None:
    """All 200,000 tokens but one are 9 below: together they make 96%."""
    logits = torch.full((200_000,), -9.0)
    logits[7] = 0.0
    drawn = [draw(logits, SamplingParams(), 1, index) for index in range(300)]
    assert sum(token == 7 for token in drawn) < 40 and len(set(drawn)) > 200


def edges(logits: Tensor, params: SamplingParams, count: int) -> list[int]:
    return [draw(logits, params, 5, index) for index in range(count)]


@pytest.mark.parametrize("top_k", [0, 3000])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_a_flat_distribution_needs_more_than_the_first_candidates(top_p: float, top_k: int) -> None:
    """Nearly flat, so that there are no ties: then what a full sort keeps is plain."""
    logits = random_logits(5000, scale=0.05)
    weights, order = logits.double().softmax(-1).sort(descending=True, stable=True)
    if top_k:
        weights = weights[:top_k] / weights[:top_k].sum()
    kept = int(((weights.cumsum(0) - weights) < top_p).sum())
    assert kept > FIRST_CANDIDATES or top_p == 0.1
    forbidden = logits.clone()
    forbidden[order[kept:]] = -torch.inf
    for index in range(51):
        expected = plain_draw(forbidden, 1.0, 2, index)
        assert draw(logits, SamplingParams(top_p=top_p, top_k=top_k), 2, index) == expected


def test_exact_ties_are_kept_by_lowest_id() -> None:
    flat = torch.zeros(5000)
    assert set(edges(flat, SamplingParams(top_k=3), 60)) == {0, 1, 2}
    assert 2400 < max(edges(flat, SamplingParams(top_p=0.5), 300)) <= 2499
    assert edges(flat, SamplingParams(top_p=1e-9), 5) == [0] * 5


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((9,), -torch.inf)
    logits[[3, 5]] = 0.0
    for options in ({}, {"top_k": 4}, {"top_p": 0.99}, {"min_p": 0.1}):
        assert set(edges(logits, SamplingParams(**options), 20)) == {3, 5}  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [1e-308, 1e-12, 100.0])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_extreme_temperatures(temperature: float, options: dict[str, float]) -> None:
    logits = random_logits(50, scale=10)
    params = SamplingParams(temperature=temperature, **options)  # type: ignore[arg-type]
    drawn = edges(logits, params, 20)
    if temperature < 1:
        assert set(drawn) == {int(logits.argmax())}
    else:
        assert len(set(drawn)) >= 5


def plain_adjust(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int], eos: int
) -> list[float]:
    """Bias, penalties and forbidden ends, as their definitions say."""
    adjusted = list(logits)
    for token_id in range(len(adjusted)):
        adjusted[token_id] += params.logit_bias.get(token_id, 0)
        if token_id in prompt or token_id in output:
            rises = adjusted[token_id] <= 0
            adjusted[token_id] *= params.repetition_penalty if rises else 1 / params.repetition_penalty
        times = output.count(token_id)
        adjusted[token_id] -= times * params.frequency_penalty + (times > 0) * params.presence_penalty
        is_end = token_id in params.stop_token_ids or (token_id == eos and not params.ignore_eos)
        if is_end and len(output) < params.min_tokens:
            adjusted[token_id] = -math.inf
    return adjusted


def test_penalties_bias_and_minimum_against_a_plain_loop() -> None:
    rng = random.Random(0)
    for trial in range(300):
        params = SamplingParams(
            temperature=0,
            repetition_penalty=rng.choice([1.0, 0.7, 1.3, 2.0]),
            presence_penalty=rng.choice([0.0, -1.5, 1.5]),
            frequency_penalty=rng.choice([0.0, -0.7, 0.7]),
            logit_bias={rng.randrange(20): rng.uniform(-5, 5) for _ in range(rng.randrange(4))},
            min_tokens=rng.choice([0, 3]),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=tuple(rng.sample(range(30), rng.randrange(4))),
        )
        prompt = [rng.randrange(20) for _ in range(rng.randint(1, 6))]
        output = [rng.randrange(20) for _ in range(rng.randrange(6))]
        logits = random_logits(20, seed=trial)
        expected = plain_adjust(logits.tolist(), params, prompt, output, eos=4)
        assert choose(logits, params, prompt, output, eos=4).token_id == int(np.argmax(expected))
        # The draw sees the same numbers.
        drawn = choose(logits, dataclasses.replace(params, temperature=1, seed=trial), prompt, output, eos=4)
        assert drawn.token_id == draw(torch.tensor(expected), SamplingParams(), trial, len(output))


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_repetition_penalty_is_transformers(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    params = SamplingParams(temperature=0, repetition_penalty=penalty)
    for seed in range(50):
        logits, seen = random_logits(12, seed=seed), [1, 2, 2, 3, 5, 8]
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([seen]), logits[None].clone())
        assert choose(logits, params, seen[:4], seen[4:]).token_id == int(theirs.argmax())


def test_a_tiny_penalty_does_not_overflow() -> None:
    params = SamplingParams(repetition_penalty=1e-40, top_k=2, seed=1)
    assert choose(torch.tensor([5.0, 6.0, 7.0]), params, [1], []).token_id == 1


def test_the_ends_are_forbidden_until_the_minimum() -> None:
    logits = torch.tensor([9.0, 8.0, 7.0, 6.0])
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(1, 77))
    chosen = [choose(logits, params, [3], [3] * done).token_id for done in range(4)]
    assert chosen == [2, 2, 0, 0]
    beyond = dataclasses.replace(params, stop_token_ids=(-1, 4))  # no ids of this vocabulary
    assert choose(torch.tensor([0.0, 1.0, 2.0, 3.0]), beyond, [3], []).token_id == 3
    only_eos_ignored = dataclasses.replace(params, stop_token_ids=(), ignore_eos=True)
    assert choose(logits, only_eos_ignored, [3], []).token_id == 0


def test_the_callers_logits_stay_as_they_are() -> None:
    logits = random_logits(20)
    before = logits.clone()
    choose(logits, SamplingParams(logit_bias={3: 50}, repetition_penalty=2, min_tokens=1), [1, 2], [])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("size", [5, 100_000])
def test_greedy_takes_the_lowest_of_equals(size: int) -> None:
    logits = torch.zeros(size)
    ties = [size // 2, size // 2 + 1, size - 1]
    logits[ties] = 3.0
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        for params in (GREEDY, dataclasses.replace(GREEDY, logit_bias={0: -1.0})):
            token = choose(logits, dataclasses.replace(params, logprobs=2), [1], [])
            assert token.token_id == ties[0]
            assert token.logprobs is not None
            assert [token_id for token_id, _ in token.logprobs.top] == ties[:2]


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = random_logits(151_936, scale=4)
    expected = logits.double().log_softmax(-1)
    params = SamplingParams(temperature=0.7, top_k=5, logit_bias={9: 100}, logprobs=20, seed=0)
    token = choose(logits, params, [1], [])
    assert token.token_id == 9  # by its bias
    logprobs = token.logprobs
    assert logprobs is not None and logprobs.token_id == 9
    assert logprobs.logprob == pytest.approx(float(expected[9]), abs=1e-5)
    values, ids = expected.topk(20)
    assert [token_id for token_id, _ in logprobs.top] == ids.tolist()
    assert [value for _, value in logprobs.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_how_many_logprobs() -> None:
    logits = random_logits(6)
    assert choose(logits, GREEDY, [1], []).logprobs is None
    none = choose(logits, dataclasses.replace(GREEDY, logprobs=0), [1], []).logprobs
    assert none is not None and none.top == ()
    assert none.logprob == pytest.approx(float(logits.double().log_softmax(-1).max()), abs=1e-5)
    assert len(token_logprobs(logits, 0, 20).top) == 6  # a vocabulary smaller than what is asked for


def varied_sequences(vocab_size: int) -> list[Sequence]:
    options: list[dict[str, object]] = [
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.2, "logprobs": 3},
        {"logprobs": 20},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 3.0, "top_p": 0.999, "logprobs": 0},
        {"top_k": 40, "min_p": 0.02},
        {"top_k": 2000, "top_p": 0.95},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {7: 3.0}},
        {"min_tokens": 10, "min_p": 0.1},
    ]
    rng = random.Random(0)
    made = []
    for index, chosen in enumerate(options):
        params = SamplingParams(seed=index, **chosen)  # type: ignore[arg-type]
        tokens = [rng.randrange(vocab_size) for _ in range(9)]
        made.append(sequence(params, tokens[:5], tokens[5:]))
    return made


@pytest.mark.parametrize("vocab_size", [997, 70_001])
def test_a_row_is_sampled_alike_alone_and_in_any_batch(vocab_size: int) -> None:
    """Bit for bit: token ids and logprobs, whatever is around it and however many threads compute."""
    sampler = Sampler(vocab_size, frozenset([2]))
    rows = varied_sequences(vocab_size)
    logits = random_logits(len(rows), vocab_size, scale=3)
    torch.set_num_threads(1)
    alone = [sample(sampler, logits[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)]
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        order = list(range(len(rows)))
        random.Random(num_threads).shuffle(order)
        for size in (1, 4, len(rows)):
            part = order[:size]
            sampled = sample(sampler, logits[part], [rows[i] for i in part])
            assert sampled == [alone[i] for i in part]


def test_a_draw_depends_on_seed_and_index_alone() -> None:
    logits = random_logits(500, scale=0.1)
    params = SamplingParams(seed=5)
    with_output = choose(logits, params, [1], [2, 3])
    other_history = choose(logits, params, [4, 4, 4], [9, 9])
    assert with_output == other_history
    drawn = {choose(logits, params, [1], [2] * done).token_id for done in range(20)}
    assert len(drawn) > 10


def test_without_a_seed_each_sequence_has_its_own() -> None:
    made = [sequence(SamplingParams(), [1], []) for _ in range(20)]
    assert len({one.seed for one in made}) == 20
    logits = random_logits(5000, scale=0.1)
    sampler = Sampler(5000, frozenset())
    first = sample(sampler, logits.expand(20, -1), made)
    assert first == sample(sampler, logits.expand(20, -1), made)
    assert len({token.token_id for token in first}) > 10


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1, top_p=0.9)])
def test_a_row_that_is_no_numbers_is_an_error_and_the_others_are_sampled(
    value: float, params: SamplingParams
) -> None:
    logits = random_logits(3, 40)
    rows = [sequence(params, [1], []) for _ in range(3)]
    first, _, last = sample(Sampler(40, frozenset()), logits, rows)
    logits[1, slice(17, 18) if value != -math.inf else slice(None)] = value
    before, failed, after = sample(Sampler(40, frozenset()), logits, rows)
    assert (before, after) == (first, last)
    assert isinstance(failed, ComputationError) and str(value) in str(failed)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 1}, {"seed": 1, "top_k": 3}])
def test_a_request_that_forbids_every_token_fails_alone(options: dict[str, float]) -> None:
    forbidding = SamplingParams(min_tokens=1, stop_token_ids=tuple(range(6)), **options)  # type: ignore[arg-type]
    rows = [sequence(forbidding, [1], []), sequence(GREEDY, [1], [])]
    sampled = sample(Sampler(6, frozenset()), random_logits(2, 6), rows)
    assert isinstance(sampled[0], NoTokenLeft) and sampled[0].params == ("min_tokens",)
    assert isinstance(sampled[1], SampledToken)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_chain_is_followed_as_far_as_it_is_right_or_to_an_end(size: int) -> None:
    """However the rows come; the next sequence's rows are where they would be."""
    sampler, logits = Sampler(50, frozenset([0])), random_logits(8, 50)
    best = logits.argmax(-1).tolist()
    stop = SamplingParams(temperature=0, stop_token_ids=(best[1],))
    for params, drafts, num_tokens in (
        (GREEDY, best[:6], 7),
        (GREEDY, [*best[:3], 50 - best[3], *best[4:6]], 4),
        (GREEDY, [(best[0] + 1) % 50, *best[1:6]], 1),
        (stop, best[:6], 2),
    ):
        rows = [sequence(params, [1, 2], []), sequence(GREEDY, [3], [])]
        items = [ScheduledSequence.of(row, row.num_pending_tokens) for row in rows]
        batch = Batch((items[0]._replace(drafts=DraftTree.chain(drafts)), items[1]))
        first, second = sampler.choose(logits.split(size), batch)  # type: ignore[no-untyped-call]
        assert [token.token_id for token in first.tokens] == best[:num_tokens]
        assert first.num_accepted == num_tokens - 1
        assert [token.token_id for token in second.tokens] == [best[7]]


def test_no_rows() -> None:
    assert Sampler(40, frozenset()).choose([], Batch(())) == []


def chi_square(values: np.ndarray, bins: int = 20) -> float:
    counts, _ = np.histogram(values, bins=bins, range=(0, 1))
    expected = len(values) / bins
    return float(((counts - expected) ** 2 / expected).sum())


LIMIT = 51.0  # of chi-square with 19 degrees of freedom: exceeded once in ten thousand


def numbers(seed: int, index: int, count: int = 4000) -> np.ndarray:
    return uniform(seed, index, np.arange(count))


@pytest.mark.parametrize("seed", [0, 1, 42, 2**63 - 1, -1, -(2**63)])
def test_random_numbers_of_one_seed(seed: int) -> None:
    """Over tokens, and over the indices of one token."""
    for values in (numbers(seed, 5), np.array([numbers(seed, index, 4)[3] for index in range(4000)])):
        assert (values > 0).all() and (values < 1).all() and len(set(values)) == 4000
        assert chi_square(values) < LIMIT
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.06
    assert (numbers(seed, 5) == numbers(seed, 5)).all()
    assert abs(np.corrcoef(numbers(seed, 5), numbers(seed, 6))[0, 1]) < 0.06


@pytest.mark.parametrize("index", [0, 1, 100])
def test_random_numbers_of_neighbouring_seeds(index: int) -> None:
    """n choices get neighbouring seeds: their first draws are as unrelated as any."""
    values = np.array([numbers(seed, index, 3)[2] for seed in range(4000)])
    assert chi_square(values) < LIMIT
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.06
    assert abs(np.corrcoef(numbers(7, index), numbers(8, index))[0, 1]) < 0.06
    following = (
        np.array([numbers(seed + 1, index - 1, 3)[2] for seed in range(4000)]) if index else values[::-1]
    )
    assert abs(np.corrcoef(values, following)[0, 1]) < 0.06


def test_the_same_noise_draws_the_same_token_from_similar_distributions() -> None:
    """At least (1 - d) / (1 + d) of the draws agree, where d is half of the sum of all differences; 3 of 400
    draws are left to chance."""
    for scale in (0.1, 0.4):
        one = random_logits(300)
        other = one + random_logits(300, seed=9, scale=scale)
        d = float((one.double().softmax(-1) - other.double().softmax(-1)).abs().sum()) / 2
        same = [draw(one, SamplingParams(), 1, i) == draw(other, SamplingParams(), 1, i) for i in range(400)]
        assert sum(same) >= 400 * (1 - d) / (1 + d) - 3 * math.sqrt(400 * d)


def test_only_allowed_tokens_are_chosen() -> None:
    logits = random_logits(50)
    allowed = SamplingParams(temperature=0, allowed_token_ids=(7, 3, 30))
    assert choose(logits, allowed, [1], []).token_id == max((3, 7, 30), key=lambda i: float(logits[i]))
    drawn = {
        choose(logits, SamplingParams(temperature=5, seed=seed, allowed_token_ids=(7, 3)), [1], []).token_id
        for seed in range(40)
    }
    assert drawn == {3, 7}


def test_allowed_and_forbidden_may_leave_nothing() -> None:
    params = SamplingParams(temperature=0, allowed_token_ids=(7,), bad_words=((7,),))
    sampler = Sampler(50, frozenset([0]))
    (failed,) = sample(sampler, random_logits(50)[None], [sequence(params, [1], [])])
    assert isinstance(failed, NoTokenLeft)
    assert str(failed).startswith("allowed_token_ids and bad_words leave no token to choose")


def test_what_the_blanks_forbid_is_told_as_theirs() -> None:
    """A full blank can only be closed, and the closing token would end the answer too early."""
    blanks = Blanks((9,), max_tokens_per_blank=1)
    params = SamplingParams(temperature=0, blanks=blanks, min_tokens=2, stop_token_ids=(9,))
    row = sequence(params, [1], [5])
    row.matcher = BlankMatcher(blanks, [0]).after(5)
    (failed,) = sample(Sampler(50, frozenset([0])), random_logits(50)[None], [row])
    assert isinstance(failed, NoTokenLeft)
    assert failed.params == ("min_tokens", "the blanks")


def test_bad_words_as_transformers_has_them() -> None:
    from transformers import NoBadWordsLogitsProcessor

    words = [[7], [4, 5, 6], [5, 9]]
    processor = NoBadWordsLogitsProcessor(words, eos_token_id=0)
    params = SamplingParams(temperature=0, bad_words=tuple(map(tuple, words)))
    for output in ([], [4], [4, 5], [5], [4, 5, 5], [5, 4]):
        logits = torch.zeros(12)
        logits[[6, 7, 9]] = torch.tensor([1.0, 3.0, 2.0])
        # transformers looks at the prompt as well, so that it is given the answer alone
        expected = processor(torch.tensor([output], dtype=torch.long), logits[None].clone())
        assert choose(logits, params, [4, 5], output).token_id == int(expected.argmax()), output


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_sequence_repeats_as_transformers_has_it(size: int) -> None:
    """Over prompt and answer together; the second text ends as it began, and the last is too short."""
    from transformers import NoRepeatNGramLogitsProcessor

    processor, params = NoRepeatNGramLogitsProcessor(size), SamplingParams(no_repeat_ngram_size=size)
    rng = random.Random(size)
    texts = [[rng.randrange(4) for _ in range(rng.randint(1, 60))] for _ in range(60)]
    for text in (*texts, [1, 2, 3, 4, 1, 2, 3, 4], [0]):
        logits = random_logits(7, seed=len(text))
        cut = rng.randint(1, len(text))
        expected = processor(torch.tensor([text]), logits[None].clone())[0]
        assert tokens_that_repeat(size, text) == (expected == -torch.inf).nonzero().flatten().tolist()
        for temperature in (0, 1):
            asked = dataclasses.replace(params, temperature=temperature, seed=5)
            wanted = int(expected.argmax())
            if temperature:
                wanted = draw(expected, SamplingParams(), 5, len(text) - cut)
            assert choose(logits, asked, text[:cut], text[cut:]).token_id == wanted


def test_sequences_that_may_not_repeat_may_leave_nothing() -> None:
    params = SamplingParams(temperature=0, no_repeat_ngram_size=1)
    (failed,) = sample(Sampler(3, frozenset([0])), random_logits(3)[None], [sequence(params, [1], [0, 2])])
    assert isinstance(failed, NoTokenLeft)
    assert failed.params == ("no_repeat_ngram_size",)


def test_ranks_count_from_one() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0])
    assert [token_logprobs(logits, token, 0).rank for token in range(4)] == [4, 1, 2, 2]
