"""What guesses should bring, against what the engine's own choice expects of the same guesses."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List

import pytest

from penstock.config import EngineConfig
from penstock.generation.drafting.acceptance import NUM_RANKS, Acceptance, kind_of_match, kind_of_rank
from penstock.generation.drafting.choice import PlainStep, choose
from penstock.generation.drafting.expectation import (
    Assumed,
    assumed_model,
    assumed_texts,
    expected,
)
from penstock.generation.drafting.guesses import Guesses
from penstock.generation.drafting.recycled_tokens import RecycledTokens
from penstock.generation.drafting.state_paths import StatePaths
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.sequence import Sequence

CONFIG = EngineConfig()


class Fresh(RecycledTokens):
    """Behind each token others were likely, which are behind no other token."""

    def followers(self, before: int, token_id: int) -> tuple[List[int], bool]:
        return range(NUM_RANKS * token_id + 1, NUM_RANKS * token_id + 1 + NUM_RANKS), False


class Known(Acceptance):
    """Guesses by rank are right as often as a plan assumes of a new text."""

    def rate(self, kind: int) -> float:
        ranks = {kind_of_rank(rank): each for rank, each in enumerate(assumed_texts()[0].rates)}
        return ranks[kind] if kind in ranks else super().rate(kind)


def streamed_s(num_tokens: int) -> float:
    """A step that waits for its layers up to 24 tokens."""
    return max(1.0, num_tokens / 24)


def quote(guesses: Guesses) -> None:
    """A chain in which each guess is as likely as the first: a plan does not count on more."""
    node: int | None = -1
    for token in range(1, 33):
        node = None if node is None else guesses.add(node, token, kind_of_match(9))


@pytest.mark.parametrize("predict_s", [streamed_s, lambda n: 1 + 0.02 * n, lambda n: 1.0 * n])
@pytest.mark.parametrize("num_seqs", [1, 3, 30])
def test_a_text_is_expected_to_bring_what_the_engine_would_choose(
    num_seqs: int, predict_s: Callable[[int], float]
) -> None:
    """The engine may give some sequences a guess more than others; a plan gives all the same."""
    new_text, quotation = assumed_texts()
    step = PlainStep(predict_s, num_seqs, num_seqs, CONFIG.max_num_batched_tokens - num_seqs)
    for drafter in (new_text, quotation):
        found = expected(drafter, num_seqs, predict_s, CONFIG)
        guesses = []
        for number in range(num_seqs):
            sequence = Sequence(number, GenerationRequest([0], SamplingParams()), 1000)
            each = Guesses(sequence, Known(), step.least_chance)
            if drafter is quotation:
                quote(each)
            else:
                each.spread(Fresh())
            guesses.append(each)
        choice = choose(guesses, step)
        counts = [len(nodes) for nodes in choice.nodes]
        assert min(counts) - 1 <= found.num_guesses <= max(counts)
        if min(counts) == max(counts) == found.num_guesses and counts[0]:
            assert found.tokens_per_s == pytest.approx(choice.rate)
            assert found.num_gained == pytest.approx(1 + choice.num_right / num_seqs)
        assert found.seconds == predict_s(num_seqs * (1 + found.num_guesses))


def test_copies_of_states_have_their_price_and_their_room() -> None:
    """Of a model with recurrent states: a tenth of a step for each sequence with guesses."""
    chain, paths = Assumed("chain", (0.5,)), StatePaths(0.1, 8)
    found = expected(chain, 2, lambda n: 1.0, CONFIG, paths)
    assert found.num_guesses == 4 and found.seconds == pytest.approx(1.2)
    assert found.tokens_per_s == pytest.approx(2 * (1 + 0.5 + 0.25 + 0.125 + 0.0625) / 1.2)
    assert expected(chain, 2, lambda n: 1.0, CONFIG, StatePaths(0.5, 8)).num_guesses == 0
    assert expected(chain, 9, lambda n: 1.0, CONFIG, StatePaths(0.0, 8)).num_guesses == 0, "no room"


def test_a_new_text_brings_what_a_real_model_showed() -> None:
    """SmolLM2-135M: 1.02 to 1.38 tokens in a step that waits for its layers."""
    new_text, quotation = assumed_texts()
    assert 1.02 <= expected(new_text, 1, lambda n: 1 + 0.001 * n, CONFIG).num_gained <= 1.38
    assert expected(quotation, 1, lambda n: 1 + 0.001 * n, CONFIG).num_gained > 4


@pytest.mark.parametrize(("num_elements", "published"), [(68e6, 2.58), (1.1e9, 4.88), (7e9, 7.74)])
def test_a_draft_model_brings_what_was_published(num_elements: float, published: float) -> None:
    """Wang et al. 2024, arXiv 2406.17276, tables 1 and 2."""
    free = assumed_model(int(num_elements), lambda _: 1e-9)
    assert expected(free, 1, lambda _: 1.0, CONFIG).num_gained == pytest.approx(published, rel=0.1)


def test_levels_cost_what_a_draft_model_takes() -> None:
    """A chain in which each guess is right half the time: level by level, until the next one costs more."""

    def chain(level_s: float) -> tuple[int, float]:
        found = expected(Assumed("chain", (0.5,), lambda places: level_s * places), 1, lambda _: 1.0, CONFIG)
        assert found.drafting_s == pytest.approx(found.num_levels * level_s)
        assert found.seconds == pytest.approx(1 + found.drafting_s)
        return found.num_levels, found.num_gained

    rates = [sum(0.5**k for k in range(levels + 1)) / (1 + 0.1 * levels) for levels in range(6)]
    assert chain(0.1) == (rates.index(max(rates)), pytest.approx(max(rates) * (1 + 0.1 * chain(0.1)[0])))
    assert chain(0.6) == (0, 1.0)
    assert chain(1e-6)[0] > 4


def test_limits() -> None:
    _, quotation = assumed_texts()
    assert expected(quotation, 1, lambda _: 1.0, EngineConfig(max_guesses=3)).num_guesses == 3
    assert expected(quotation, 8, lambda _: 1.0, EngineConfig(max_num_batched_tokens=24)).num_guesses == 2
    with pytest.raises(ValueError, match="nothing is known"):
        expected(quotation, 1, lambda _: 0.0, CONFIG)
