"""How tokens choose experts: from the popularity of experts to the experts of a step, and to those of them
that a cache holds. Pure.

A token chooses `k` different experts of a layer, each time in proportion to the weights of those that are
left. Weights belong to ranks: 0 is the most popular expert of its layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from penstock.spec import ExpertFootprint, UnitKey

#: The usual popularity: an expert of rank r has the weight (r + 2) ** -1.5. With 128 experts of which a token
#: chooses 8, a cache of the last used experts then hits 51%, 73%, 88% and 95% with room for 1/8, 1/4, 1/2 and
#: 3/4 of them. For Qwen3-30B-A3B others published 53% with 12% and 76% with 24%, and for models like it 55%,
#: 75 to 80%, 85 to 90% and 95%. Four tokens together choose 20 experts, and 63 tokens 83 to 84; published are
#: 20 and 80. Other models differ: gpt-oss-120b hit 27% with 3.4%, and this popularity gives 47%.
USUAL_EXPONENT, USUAL_OFFSET = 1.5, 2
#: A cache with room for fewer than so many sweeps pins experts (weights/tiers/expert_policy.py). With more
#: room, the least recently used expert goes.
PINNED_BELOW_SWEEPS = 2
#: Halvings that find a number to more digits than anything here has.
NUM_HALVINGS = 60
#: A popularity is learned from the uses of at least so many sweeps.
LEAST_SWEEPS = 500
#: No expert counts as one that more tokens choose.
MOST_SHARE = 0.999


def usual_weights(num_experts: int) -> tuple[float, ...]:
    """The usual popularity of a layer's experts, by rank."""
    return tuple((rank + USUAL_OFFSET) ** -USUAL_EXPONENT for rank in range(num_experts))


@lru_cache(maxsize=16)
def chosen_shares(weights: tuple[float, ...], num_chosen: float) -> tuple[float, ...]:
    """For each expert of a layer, the share of tokens that choose it. If each expert rang at random times, in
    proportion to its weight, then a token would choose the first `num_chosen` that ring: an expert's share is
    1 - exp(-c weight), with the c that makes the sum right. Exact are the shares only on average."""
    if num_chosen >= len(weights):
        return (1.0,) * len(weights)
    largest = max(weights)

    def shares(c: float) -> list[float]:
        return [1 - 2 ** (-c * weight / largest) for weight in weights]

    return tuple(shares(_solve(lambda c: sum(shares(c)), num_chosen)))


def step_shares(shares: Sequence[float], num_tokens: int) -> list[float]:
    """For each expert, the share of steps with so many tokens that ask for it. Their sum is the number of
    different experts that a step asks for in a layer."""
    return [1 - (1 - share) ** num_tokens for share in shares]


def hit_rate(shares: Sequence[float], num_slots: float) -> float:
    """The share of the asked-for experts that are in a cache with `num_slots` for the layer. `shares` are
    those of step_shares().

    A cache of the last used experts holds those that were asked for in the last t steps, with the t that
    makes their number right (Che, Tung and Wang, 2002). A smaller cache holds the most popular experts."""
    asked = sum(shares)
    if num_slots >= len(shares) or not asked:
        return 1.0
    if num_slots < PINNED_BELOW_SWEEPS * asked:
        ranked, whole = sorted(shares, reverse=True), int(num_slots)
        return (sum(ranked[:whole]) + (num_slots - whole) * ranked[whole]) / asked

    def held(t: float) -> list[float]:
        return [1 - (1 - share) ** t for share in shares]

    there = held(_solve(lambda t: sum(held(t)), num_slots))
    return sum(share * held for share, held in zip(shares, there, strict=True)) / asked


def weights_of(experts: ExpertFootprint) -> tuple[float, ...]:
    """The popularity of a layer's experts, as it was learned or as it usually is."""
    return experts.weights or usual_weights(experts.per_layer)


def learned_weights(uses: Mapping[UnitKey, float], experts: ExpertFootprint) -> tuple[float, ...]:
    """The popularity that a model's uses show, averaged over its layers rank by rank. () if there were too
    few uses: chance alone would look like popularity then."""
    num_layers = max(1, experts.count // experts.per_layer)
    num_chosen = experts.count_per_token / num_layers
    ranks = [0.0] * experts.per_layer
    layers: dict[tuple[str, int], list[float]] = {}
    for key, count in uses.items():
        layers.setdefault(key[:2], []).append(count)
    if len(layers) < num_layers or min(map(sum, layers.values())) < LEAST_SWEEPS * num_chosen:
        return ()
    for counts in layers.values():
        for rank, count in enumerate(sorted(counts, reverse=True)[: len(ranks)]):
            ranks[rank] += num_chosen * count / sum(counts) / num_layers
    return tuple(-math.log(1 - min(share, MOST_SHARE)) for share in ranks)


def _solve(function: Callable[[float], float], value: float) -> float:
    """The x for which a rising function has a value, from 0 up."""
    low, high = 0.0, 1.0
    while function(high) < value and high < 2**40:
        low, high = high, 2 * high
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < value else (low, middle)
    return high
