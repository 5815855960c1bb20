"""Expectation: what drafts should bring to a step, by what is assumed of them before any was tried. Pure.

A plan knows what a step of so many tokens takes, and not how often guesses will be right. So one drafter
after the other is assumed: each place of a text has the same followers, each with the rate at which it is
right. The best tree for the step is that of choice.py: the likeliest nodes, as many as pay.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from penstock.config import EngineConfig
from penstock.generation.drafting.acceptance import Acceptance, kind_of_match
from penstock.generation.drafting.asking import MAX_WIDTH
from penstock.generation.drafting.choice import LEAST_GAIN, PlainStep
from penstock.generation.drafting.state_paths import NO_PATHS, StatePaths

#: Seconds of a step or of a draft model's level, by its tokens.
Predict = Callable[[int], float]
#: How often what a model found likely before, by rank, is right in a text that is new. With these rates a
#: step that waits for its layers has 1.2 tokens; answers of a real model (SmolLM2-135M) had 1.02 to 1.38,
#: by the kind of text. The engine hopes for more at first (Acceptance), and learns how it is.
_NEW_TEXT_RATES = (0.09, 0.03, 0.018, 0.012, 0.009, 0.0075, 0.006, 0.006)
#: A quotation: the same words stood before, so many of them.
_QUOTED = 9
#: Elements of a draft model's matrices -> how often its first guess is right. In trees of 32 these give 2.7,
#: 4.9 and 7.7 tokens a step, as was measured with MT-Bench at temperature 0 (Wang et al. 2024, arXiv
#: 2406.17276, tables 1 and 2: 2.58, 4.88 and 7.74).
_FIRST_RATES = ((68e6, 0.38), (1.1e9, 0.76), (7e9, 0.87))
#: How often a head of multi-token prediction is right. DeepSeek V3's is in 85 to 90% of cases with the first
#: token (arXiv 2412.19437, 5.4.3); for further ones it was not made.
_HEAD_RATE = 0.75
#: How often the first guess of an EAGLE-3 head is right. Trees of 60 guesses and 8 levels then give 5.5
#: tokens a step. With MT-Bench at temperature 0, 5.63 were measured for Llama 3.3 70B, and 6.13 for Llama
#: 3.1 8B (arXiv 2503.01840, table 1).
_EAGLE3_RATE = 0.78
#: How often a guess of a DFlash head is right where those before it are. A chain of 15 then gives 4.9 tokens
#: a step. For Qwen3.5-4B, 4.99 (GSM8K) and 5.42 (MATH-500) are reported.
_DFLASH_RATE = 0.8
#: How often the first guess of a model's upper planes is right: docs/measured/speculation.md, "Upper planes
#: as drafts".
_PLANES_RATE = 0.92
#: Most levels of a draft model's trees.
MAX_LEVELS = 16
#: The shares of the first guess's failures in which the second to fourth guess is right.
_OTHER_RATES = (0.4, 0.15, 0.08)


class Assumed(NamedTuple):
    """A drafter."""

    name: str
    #: The rates at which a place's followers are right, the likeliest first.
    rates: tuple[float, ...]
    #: What it takes to guess one level of trees, by the number of places; None: nothing.
    level_s: Predict | None = None
    #: Levels that one pass guesses, whatever the number of their places, which level_s prices by the number
    #: of sequences; 0: each level takes a pass.
    levels_of_pass: int = 0


class Expected(NamedTuple):
    """A step with the guesses that should give the most tokens per second."""

    name: str
    num_seqs: int
    #: Guesses of each sequence; 0 where none pays. Levels of a draft model's tree.
    num_guesses: int
    num_levels: int
    #: Tokens that each sequence gains in a step.
    num_gained: float
    #: Seconds of the step, of them those in which a draft model guesses, and of a step without guesses.
    seconds: float
    drafting_s: float
    plain_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_seqs * self.num_gained / self.seconds

    @property
    def plain_tokens_per_s(self) -> float:
        return self.num_seqs / self.plain_s


def assumed_texts() -> list[Assumed]:
    """What needs no model: a text that is new, of which only what the model found likely before is known, and
    an answer that repeats a text, as long as it does."""
    quoted = Acceptance().rate(kind_of_match(_QUOTED))
    return [Assumed("new_text", _NEW_TEXT_RATES), Assumed("quotation", (quoted,))]


def assumed_model(num_elements: int, level_s: Predict) -> Assumed:
    """A draft model with so many elements in its matrices. Between the sizes that were measured, the rate
    grows with the size's logarithm."""
    (low, rate), *others = _FIRST_RATES
    for high, other in others:
        share = math.log(max(num_elements, low) / low) / math.log(high / low)
        first = rate + min(1.0, share) * (other - rate)
        if share <= 1:
            break
        low, rate = high, other
    return Assumed("draft_model", (first, *((1 - first) * each for each in _OTHER_RATES)), level_s)


def assumed_head(level_s: Predict) -> Assumed:
    """A head of multi-token prediction that came with a model."""
    return Assumed("mtp", (_HEAD_RATE, *((1 - _HEAD_RATE) * each for each in _OTHER_RATES)), level_s)


def assumed_eagle3(level_s: Predict) -> Assumed:
    """An EAGLE-3 head that was trained for a model."""
    return Assumed("eagle3", (_EAGLE3_RATE, *((1 - _EAGLE3_RATE) * each for each in _OTHER_RATES)), level_s)


def assumed_dflash(pass_s: Predict, num_guesses: int) -> Assumed:
    """A DFlash head that was trained for a model, whose pass guesses so many tokens of each sequence."""
    rates = (_DFLASH_RATE, *((1 - _DFLASH_RATE) * each for each in _OTHER_RATES))
    return Assumed("dflash", rates, pass_s, num_guesses)


def assumed_planes(level_s: Predict) -> Assumed:
    """The upper planes of a model's own weights."""
    return Assumed("planes", (_PLANES_RATE, *((1 - _PLANES_RATE) * each for each in _OTHER_RATES)), level_s)


def expected(
    drafter: Assumed,
    num_seqs: int,
    predict_s: Predict,
    config: EngineConfig,
    paths: StatePaths = NO_PATHS,
) -> Expected:
    """A step of so many sequences, each with as many guesses as pay. Raises ValueError if a step takes no
    known time."""
    plain_s = predict_s(num_seqs)
    if plain_s <= 0:
        raise ValueError("nothing is known of a step's time")
    room = max(0, min(paths.room, config.max_num_batched_tokens - num_seqs)) // num_seqs
    step = PlainStep(predict_s, num_seqs, num_seqs, room * num_seqs, config.max_guesses, path_s=paths.seconds)
    best = Expected(drafter.name, num_seqs, 0, 0, 1.0, plain_s, 0.0, plain_s)
    least, least_chance = LEAST_GAIN * best.tokens_per_s, step.least_chance
    most_levels = drafter.levels_of_pass or MAX_LEVELS
    for num_levels in range(1, most_levels + 1) if drafter.level_s else (config.max_guesses,):
        right, width = 0.0, Counter[int]()
        for number, (chance, depth) in enumerate(_nodes(drafter.rates, num_levels), 1):
            if number > min(config.max_guesses, room) or chance < least_chance:
                break
            right += chance
            width[depth] += 1
            drafting_s = _drafting_s(drafter, width, num_seqs)
            rate = step.rate(num_seqs * right, num_seqs * number, drafting_s)
            if rate > max(least, best.tokens_per_s):
                seconds = step.seconds(num_seqs * number, drafting_s)
                best = Expected(
                    drafter.name, num_seqs, number, len(width), 1 + right, seconds, drafting_s, plain_s
                )
    return best


def _drafting_s(drafter: Assumed, width: Counter[int], num_seqs: int) -> float:
    """Seconds of the levels of trees that have so many nodes in each level: a level is asked for at the nodes
    of the level before."""
    if drafter.level_s is None:
        return 0.0
    if drafter.levels_of_pass:
        return drafter.level_s(num_seqs)
    places = (min(MAX_WIDTH, width[level - 1]) if level > 1 else 1 for level in range(1, len(width) + 1))
    return sum(drafter.level_s(num_seqs * each) for each in places)


def _nodes(rates: tuple[float, ...], num_levels: int) -> Iterator[tuple[float, int]]:
    """The chances and depths of an endless tree's nodes down to some depth, likeliest first."""
    heap = [(-rate, 1) for rate in rates]
    heapq.heapify(heap)
    while heap:
        chance, depth = heapq.heappop(heap)
        yield -chance, depth
        if depth < num_levels:
            for rate in rates:
                heapq.heappush(heap, (chance * rate, depth + 1))
