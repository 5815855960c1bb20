"""How many experts move to a card and how many the processor computes, compared with virtual time."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
from lane_simulation import experts_seconds

from penstock.config import EngineConfig
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.cards import find_card
from penstock.memory.planning.cost import predict_step
from penstock.memory.planning.experts.expert_lanes import (
    MOST_TOKENS,
    ExpertLoad,
    ExpertRates,
    expert_rates,
)
from penstock.memory.planning.experts.planned_lanes import planned_lanes
from penstock.memory.planning.plan import HANDOVER_BYTES
from penstock.memory.planning.planner import plan_memory
from penstock.memory.planning.popularity import usual_weights
from penstock.model.known_shapes import find_shape
from penstock.model.registry import find_family
from penstock.model.shapes import footprint, planned_tensors
from penstock.spec import ExpertFootprint, ModelFootprint

GB = 1e9
#: Of Qwen3-30B-A3B in 4 bits: 6144 experts in 48 layers, of which a token passes through 8 each.
EXPERTS = ExpertFootprint(2_650_000, 4_718_592, 6144, 384, 128)
#: The rates of SOLAR-10.7B's example in test_product_split.py.
MACHINE = HardwareProfile(6, 32 << 30, 28 << 30, 34.0, 1800.0, None, find_card("GTX 1060"))


def rates_of(
    num_bytes: float, link_gbps: float, memory_gbps: float, processor: tuple[float, float], card_gbps: float
) -> ExpertRates:
    """`processor` reads and computes so many 1e9 bytes a second; computing takes as often as there are
    tokens."""
    read, computed = processor
    return ExpertRates(
        num_bytes,
        link_gbps * GB,
        memory_gbps * GB,
        lambda num_tokens: max(num_bytes / read, num_tokens * num_bytes / computed) / GB,
        lambda num_tokens: num_bytes / card_gbps / GB,
        crossings_s=2e-4,
    )


def layers(number: int) -> list[tuple[ExpertRates, list[ExpertLoad], float]]:
    """Layers of invented machines: weak and strong processors, links and memories."""
    draw, found = random.Random(0), []
    for _ in range(number):
        read = draw.uniform(5, 100)
        rates = rates_of(
            draw.uniform(1, 20) * 1e6,
            draw.uniform(1, 50),
            read * draw.uniform(1, 1.5),
            (read, read * draw.uniform(1, 30)),
            draw.uniform(50, 1000),
        )
        tokens = sorted((draw.choice((1, 1, 2, 4, 30)) for _ in range(draw.randint(1, 8))), reverse=True)
        found.append(
            (rates, [ExpertLoad(each) for each in tokens], draw.choice((0.0, draw.uniform(0, 2e-3))))
        )
    return found


def simulated(rates: ExpertRates, experts: list[ExpertLoad], moved: set[int], card_s: float) -> float:
    own = [(rates.processor_s(each.num_tokens), rates.card_s(each.num_tokens)) for each in experts]
    return experts_seconds(rates, own, moved, card_s)


def test_no_choice_of_experts_is_better() -> None:
    """Than the chosen number of those with the most tokens, of all sets of experts, but for what the formula
    leaves out: the link may be done in the middle of an expert."""
    for rates, experts, card_s in layers(150):
        number = rates.num_moved(experts, card_s)
        mine = simulated(rates, experts, set(range(number)), card_s)
        every = range(len(experts))
        sets = itertools.chain.from_iterable(
            itertools.combinations(every, size) for size in range(len(experts) + 1)
        )
        best = min(simulated(rates, experts, set(chosen), card_s) for chosen in sets)
        assert mine <= 1.05 * best
        assert mine <= 1.0001 * simulated(rates, experts, set(every), card_s), "moving all is never faster"


def test_seconds_are_those_of_virtual_time() -> None:
    for rates, experts, card_s in layers(150):
        for number in range(len(experts) + 1):
            expected = simulated(rates, experts, set(range(number)), card_s)
            assert rates.layer_s(experts, number, card_s) == pytest.approx(expected, rel=0.1)
        best = min(rates.layer_s(experts, number, card_s) for number in range(len(experts) + 1))
        assert rates.layer_s(experts, rates.num_moved(experts, card_s), card_s) == pytest.approx(best)


def test_more_tokens_make_experts_move() -> None:
    rates = expert_rates(EXPERTS, MACHINE, 2)
    assert rates is not None
    moved = [rates.num_moved([ExpertLoad(each)] * 8) for each in (1, 2, 8, 16, 32, 64)]
    assert moved == sorted(moved) and 0 < moved[0] < 4 and moved[-1] >= 6


def test_the_processor_gets_no_more_than_the_card_has_room_for() -> None:
    rates = rates_of(1e6, 1e-3, 50, (40, 1e6), 1000)
    experts = [ExpertLoad(100.0)] * 10
    assert rates.num_moved(experts) == 10 - MOST_TOKENS // 100


def test_one_expert_is_not_worth_two_crossings() -> None:
    rates = expert_rates(EXPERTS, MACHINE, 2)
    assert rates is not None and rates.move_s < rates.crossings_s + rates.processor_s(1)
    assert rates.num_moved([]) == 0 and rates.num_moved([ExpertLoad(1)]) == 1


def test_unknown_rates_share_nothing() -> None:
    assert expert_rates(EXPERTS, replace(MACHINE, int8_gops=0.0), 1) is None
    assert expert_rates(EXPERTS, replace(MACHINE, device=None), 1) is None


def test_planned_experts_are_those_of_a_step() -> None:
    rates = expert_rates(EXPERTS, MACHINE, 2)
    assert rates is not None
    for num_tokens in (1, 8, 64):
        demand, _, num_passes = planned_lanes(EXPERTS, rates, num_tokens, 1000, 6144)
        assert demand.num_in_ram <= num_passes <= 48 * min(MOST_TOKENS, 8 * num_tokens)
        assert demand.num_in_ram > 0 and demand.num_in_ram + demand.num_missing < demand.num_asked
        assert demand.num_from_disk == pytest.approx(0, abs=1e-6)
        some, _, _ = planned_lanes(EXPERTS, rates, num_tokens, 1000, 3000)
        assert some.num_missing >= some.num_from_disk > 0 and some.num_in_ram < demand.num_in_ram
    whole, seconds, _ = planned_lanes(EXPERTS, rates, 8, 6144, 6144)
    assert whole.num_in_ram == whole.num_missing == seconds == 0


def qwen() -> ModelFootprint:
    told = find_shape("qwen3-30b-a3b")
    family = find_family(told)
    spec = family.read_spec(told)
    return footprint(spec, planned_tensors(family.model_tensors(spec), told, "int4", None))


def test_a_plan_of_a_gtx_1060() -> None:
    """The card has as many experts, but for the room of activations; RAM has the rest, and the plan says
    what this brings."""
    size, settings = qwen(), EngineConfig(num_kv_tokens=4096)
    shared, alone = plans = [
        plan_memory(size, MACHINE, each) for each in (settings, replace(settings, share_products="off"))
    ]
    assert shared.shares_experts and not alone.shares_experts
    assert shared.num_expert_slots > 0.97 * alone.num_expert_slots
    assert shared.device_used_bytes <= shared.device_budget_bytes
    assert shared.host_used_bytes == alone.host_used_bytes + HANDOVER_BYTES
    (note,) = (note for note in shared.notes if "experts that lie in RAM" in note)
    assert "--share-products off" in note
    for num_tokens, gain in ((1, 0.99), (8, 1.2), (32, 1.2)):
        mine, theirs = (predict_step(plan, size, MACHINE, settings, num_tokens, num_tokens) for plan in plans)
        assert theirs.seconds / mine.seconds >= gain, (num_tokens, theirs.seconds, mine.seconds)
        assert mine.floor_s <= mine.seconds


def test_the_handover_takes_the_place_of_some_experts() -> None:
    size = qwen()
    settings = EngineConfig(num_kv_tokens=4096, host_memory_bytes=12 << 30)
    plan = plan_memory(size, MACHINE, settings)
    assert plan.shares_experts and plan.num_host_expert_slots < size.experts.count
    assert plan.host_budget_bytes - plan.expert_slot_bytes < plan.host_used_bytes <= plan.host_budget_bytes


def drawn_step(draw: random.Random, num_tokens: int) -> Counter[int]:
    """The experts of a layer that tokens choose, by the usual popularity of 128, and for how many tokens."""
    chosen = Counter[int]()
    for _ in range(num_tokens):
        weights = list(usual_weights(EXPERTS.per_layer))
        for _ in range(8):
            (number,) = draw.choices(range(len(weights)), weights)
            chosen[number] += 1
            weights[number] = 0.0
    return chosen


@pytest.mark.parametrize(("num_tokens", "gain"), [(1, 1.2), (8, 2.2), (32, 2.5)])
def test_drawn_steps_take_what_is_planned(num_tokens: int, gain: float) -> None:
    """Layer by layer in virtual time, with the most popular experts on the card. Moving all missing experts,
    as without the processor, takes `gain` times as long."""
    rates, draw = expert_rates(EXPERTS, MACHINE, 2), random.Random(1)
    assert rates is not None
    num_slots, num_layers = 37 * 48, 60
    shared = moved = 0.0
    for _ in range(num_layers):
        chosen = drawn_step(draw, num_tokens)
        missing = [ExpertLoad(tokens) for expert, tokens in chosen.most_common() if expert >= 37]
        card_s = sum(rates.card_s(tokens) for expert, tokens in chosen.items() if expert < 37)
        number = rates.num_moved(missing, card_s)
        shared += simulated(rates, missing, set(range(number)), card_s) * 48 / num_layers
        moved += simulated(rates, missing, set(range(len(missing))), card_s) * 48 / num_layers
    demand, processor_s, _ = planned_lanes(EXPERTS, rates, num_tokens, num_slots, EXPERTS.count)
    assert max(processor_s, demand.num_missing * rates.move_s) == pytest.approx(shared, rel=0.25)
    assert moved > gain * shared
