"""Which experts stay, on invented traces: against the optimum (Belady's), which knows the future, against a
plain cache of the last used, and against hit rates that others published."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest
import torch

from penstock.kernels import Router, Routing
from penstock.kernels.reference import ReferenceKernels
from penstock.memory.planning.popularity import (
    chosen_shares,
    hit_rate,
    learned_weights,
    step_shares,
    usual_weights,
)
from penstock.model.mixture.drawn_routing import DrawnRouters
from penstock.model.mixture.sparse_mixer import sparse_mixer
from penstock.spec import ExpertFootprint, UnitKey
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tiers.expert_policy import ExpertPolicy
from penstock.weights.tiers.use_counts import UseCounts

#: Qwen3-30B-A3B with fewer layers. A sweep of one token asks for SWEEP experts.
NUM_LAYERS, NUM_EXPERTS, NUM_CHOSEN = 8, 128, 8
SWEEP, BANK = NUM_LAYERS * NUM_CHOSEN, NUM_LAYERS * NUM_EXPERTS
#: Steps, of which the first ones fill the cache.
NUM_STEPS, NUM_FIRST = 110, 50
Expert = tuple[int, int]
#: The experts of each layer of each step.
Trace = list[list[list[Expert]]]


def draw(weights: tuple[float, ...], chance: random.Random) -> list[int]:
    """The experts of one token: of clocks that ring at random, the first ones."""
    times = sorted((chance.expovariate(weight), number) for number, weight in enumerate(weights))
    return [number for _, number in times[:NUM_CHOSEN]]


@cache
def trace(is_usual: bool) -> Trace:
    chance = random.Random(5)
    weights = usual_weights(NUM_EXPERTS) if is_usual else (1.0,) * NUM_EXPERTS
    return [
        [[(layer, number) for number in draw(weights, chance)] for layer in range(NUM_LAYERS)]
        for _ in range(NUM_STEPS)
    ]


def plain_lru(trace: Trace, num_slots: int) -> float:
    held: dict[Expert, None] = {}
    hits = asked = 0
    for step, layers in enumerate(trace):
        for expert in (each for layer in layers for each in layer):
            asked, hits = asked + (step >= NUM_FIRST), hits + (step >= NUM_FIRST and expert in held)
            if expert in held:
                del held[expert]
            elif len(held) == num_slots:
                del held[next(iter(held))]
            held[expert] = None
    return hits / asked


def optimum(trace: Trace, num_slots: int) -> float:
    """The expert goes whose next use is farthest."""
    uses = [(step, each) for step, layers in enumerate(trace) for layer in layers for each in layer]
    next_uses, later = [0] * len(uses), dict[Expert, int]()
    for index in range(len(uses) - 1, -1, -1):
        next_uses[index] = later.get(uses[index][1], len(uses))
        later[uses[index][1]] = index
    held: dict[Expert, int] = {}
    hits = asked = 0
    for (step, expert), next_use in zip(uses, next_uses, strict=True):
        asked, hits = asked + (step >= NUM_FIRST), hits + (step >= NUM_FIRST and expert in held)
        if expert not in held and len(held) == num_slots:
            del held[max(held, key=held.__getitem__)]
        held[expert] = next_use
    return hits / asked


def ours(trace: Trace, num_slots: int) -> float:
    uses = UseCounts[Expert](SWEEP)
    policy, held = ExpertPolicy(num_slots, uses), set[Expert]()
    hits = asked = 0
    for step, layers in enumerate(trace):
        for layer in layers:
            asked += len(layer) * (step >= NUM_FIRST)
            hits += len(held.intersection(layer)) * (step >= NUM_FIRST)
            serve(policy, uses, held, layer, num_slots)
    return hits / asked


def serve(
    policy: ExpertPolicy[Expert],
    uses: UseCounts[Expert],
    held: set[Expert],
    layer: list[Expert],
    num_slots: int,
) -> None:
    """A layer's experts, as a DemandTier brings them: those that are there, then the others one by one."""
    uses.add(layer)
    missing = [expert for expert in layer if expert not in held]
    for expert in (each for each in layer if each in held):
        policy.use([expert])
    for number, expert in enumerate(missing):
        if len(held) == num_slots:
            waited_for = set(missing[number:])
            victim = policy.victim(
                len(layer) * NUM_LAYERS, lambda key, busy=waited_for: key not in busy, True
            )
            assert victim is not None
            policy.remove(victim)
            held.remove(victim)
        held.add(expert)
        policy.use([expert])


def test_the_usual_popularity_gives_the_published_hit_rates() -> None:
    """Others published for Qwen3-30B-A3B and a cache of the last used experts: 53% with room for 12%, and 76%
    with 24%, and as a rule 85 to 90% with half and 95% with three quarters."""
    for share, published in ((0.12, 0.53), (0.24, 0.76), (0.5, 0.875), (0.75, 0.95)):
        assert plain_lru(trace(True), int(share * BANK)) == pytest.approx(published, abs=0.05)


def test_the_usual_popularity_gives_the_published_unions() -> None:
    """Four tokens of a model with 128 experts choose 20.4 of them together (29.1 if all were alike), and 63
    tokens about 80 (126)."""
    shares = chosen_shares(usual_weights(NUM_EXPERTS), NUM_CHOSEN)
    assert sum(step_shares(shares, 4)) == pytest.approx(20.4, rel=0.05)
    assert sum(step_shares(shares, 63)) == pytest.approx(80, rel=0.06)
    alike = chosen_shares((1.0,) * NUM_EXPERTS, NUM_CHOSEN)
    assert sum(step_shares(alike, 4)) == pytest.approx(29.1, abs=0.1)


@pytest.mark.parametrize("is_usual", [True, False])
@pytest.mark.parametrize("share", [0.14, 0.25, 0.5, 0.75])
def test_the_plans_hit_rate_is_that_of_the_cache(is_usual: bool, share: float) -> None:
    weights = usual_weights(NUM_EXPERTS) if is_usual else (1.0,) * NUM_EXPERTS
    planned = hit_rate(chosen_shares(weights, NUM_CHOSEN), share * NUM_EXPERTS)
    assert planned == pytest.approx(ours(trace(is_usual), int(share * BANK)), abs=0.04)


@pytest.mark.parametrize("is_usual", [True, False])
def test_with_room_for_two_sweeps_it_is_the_cache_of_the_last_used(is_usual: bool) -> None:
    """Within a layer, the uses of what is there come first here, so that the two are not equal."""
    for num_sweeps in (2, 4, 9):
        slots = num_sweeps * SWEEP
        assert ours(trace(is_usual), slots) == pytest.approx(plain_lru(trace(is_usual), slots), abs=0.02)


def test_below_two_sweeps_popular_experts_stay() -> None:
    """Below one sweep, a cache of the last used experts never hits."""
    for num_sweeps, of_optimum in ((0.5, 0.7), (0.95, 0.75), (1.5, 0.8), (1.9, 0.8)):
        slots = int(num_sweeps * SWEEP)
        found, best, plain = (hits(trace(True), slots) for hits in (ours, optimum, plain_lru))
        assert best >= found >= of_optimum * best and found > plain + 0.1
    assert plain_lru(trace(True), SWEEP // 2) < 0.01


def test_a_step_of_many_tokens_leaves_what_the_next_ones_need() -> None:
    """A prompt asks for all experts of all layers, more than there is room for."""
    slots = BANK // 4
    prompt = [[[(layer, number) for number in range(NUM_EXPERTS)] for layer in range(NUM_LAYERS)]]
    steps = trace(True)
    with_prompt = [*steps[:NUM_FIRST], *prompt, *steps[NUM_FIRST : NUM_FIRST + 4]]

    def hits(run: Callable[[Trace, int], float]) -> float:
        return run(with_prompt, slots) * (BANK + 4 * SWEEP)

    assert hits(ours) > hits(plain_lru) + 0.2 * 4 * SWEEP


def test_learned_weights_are_those_that_were_drawn() -> None:
    experts = ExpertFootprint(1, 1, BANK, SWEEP, NUM_EXPERTS)
    shares = chosen_shares(usual_weights(NUM_EXPERTS), NUM_CHOSEN)
    uses = {
        UnitKey("decoder", layer, number): 1000 * shares[(number + layer) % NUM_EXPERTS]
        for layer in range(NUM_LAYERS)
        for number in range(NUM_EXPERTS)
    }
    learned = learned_weights(uses, experts)
    assert chosen_shares(learned, NUM_CHOSEN) == pytest.approx(shares, abs=0.02)
    assert learned_weights({key: count / 10 for key, count in uses.items()}, experts) == ()


def test_drawn_routers_choose_by_the_popularity() -> None:
    weights = usual_weights(NUM_EXPERTS)
    kernels = DrawnRouters(ReferenceKernels(), weights)
    router, routing = Router(torch.zeros(NUM_EXPERTS, 4)), Routing(NUM_EXPERTS, NUM_CHOSEN)
    experts, _ = kernels.route(torch.zeros(4000, 4), router, routing)
    chosen = experts.flatten().bincount(minlength=NUM_EXPERTS) / 4000
    assert chosen.tolist() == pytest.approx(chosen_shares(weights, NUM_CHOSEN), abs=0.04)


def test_drawn_routers_choose_for_sparse_mixer() -> None:
    """The first expert of two by their weights."""
    kernels = DrawnRouters(ReferenceKernels(), (3.0, 1.0))
    weights = LayerWeights({"router": torch.zeros(2, 4)})
    chosen = sparse_mixer(kernels, weights, torch.zeros(4000, 4), 1, 0.02).experts
    assert (chosen == 0).float().mean().item() == pytest.approx(0.75, abs=0.04)


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
def test_drawn_routers_guess_the_next_layers_choice(share: float) -> None:
    kernels = DrawnRouters(ReferenceKernels(), usual_weights(NUM_EXPERTS), share_guessed=share)
    first, second = (Router(torch.zeros(NUM_EXPERTS, 4)) for _ in range(2))
    routing = Routing(NUM_EXPERTS, NUM_CHOSEN)
    num_right = 0
    for _ in range(300):
        x = torch.zeros(1, 4)
        kernels.route(x, first, routing)
        guess = kernels.route(x, second, routing).experts[0].tolist()
        chosen = kernels.route(torch.zeros(1, 4), second, routing).experts[0].tolist()
        num_right += len(set(guess) & set(chosen))
    by_chance = sum(each**2 for each in chosen_shares(usual_weights(NUM_EXPERTS), NUM_CHOSEN)) / NUM_CHOSEN
    expected = {0.0: by_chance, 0.8: 0.8, 1.0: 1.0}[share]
    assert num_right / 300 / NUM_CHOSEN == pytest.approx(expected, abs=0.04)


def test_old_uses_count_less() -> None:
    uses = UseCounts[str](1)
    uses.add(["old"] * 1000)
    uses.add(["new"] * 1000)  # half of the old count's weight is gone
    assert uses.counts["new"] == pytest.approx(2 * uses.counts["old"], rel=0.01)
    assert uses.most_used(1) == ["new"] and uses.most_used(1, favoured={"old"}) == ["new"]
    assert UseCounts(1, uses.counts).counts == uses.counts
