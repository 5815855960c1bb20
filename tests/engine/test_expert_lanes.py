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
from penstock.memory.planning.expert_lanes import (
    MOST_TOKENS,
    ExpertLoad,
    ExpertRates,
    expert_rates,
)
from penstock.memory.planning.plan import HANDOVER_BYTES
from penstock.memory.planning.planned_lanes import planned_lanes
from penstock.memory.planning.planner import plan_memory
from penstock.memory.planning.popularity import usual_weights
from penstock.memory.planning.step_work import StepLoad
from penstock.model.footprint import footprint
from penstock.model.known_shapes import find_shape
from penstock.model.registry import find_family
from penstock.spec import ExpertFootprint, ModelFootprint
from penstock.weights.store import planned_tensors

GB = 1e9
#: Of Qwen3-30B-A3B in 4 bits: 6144 experts in 48 layers, of which a token passes through 8 each.
EXPERTS = ExpertFootprint(2_650_000, 4_718_592, 6144, 384, 128)
#: The rates of SOLAR-10.7B's example in test_product_split.py.
MACHINE = HardwareProfile(6, 32 << 30, 28 << 30, 34.0, 1800.0, None, find_card("GTX 1060"))


def rates_of(
    num_bytes: float,
    link_gbps: float,
    memory_gbps: float,
    processor: tuple[float, float],
    card_gbps: float,
    disk_gbps: float = 0.0,
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
        disk_bps=disk_gbps * GB,
    )


Layer = tuple[ExpertRates, list[ExpertLoad], float, list[ExpertLoad]]


def layers(number: int) -> list[Layer]:
    """Layers of invented machines: weak and strong processors, links, memories and disks. Their rates, the
    experts in RAM, the card's seconds for its own, and the experts that come from the disk."""
    draw, found = random.Random(0), []
    for _ in range(number):
        read = draw.uniform(5, 100)
        rates = rates_of(
            draw.uniform(1, 20) * 1e6,
            draw.uniform(1, 50),
            read * draw.uniform(1, 1.5),
            (read, read * draw.uniform(1, 30)),
            draw.uniform(50, 1000),
            draw.uniform(0.5, 14),
        )
        in_ram, from_disk = (
            [
                ExpertLoad(each)
                for each in sorted((draw.choice((1, 1, 2, 4, 30)) for _ in range(count)), reverse=True)
            ]
            for count in (draw.randint(1, 7), draw.choice((0, 1, 2, 5)))
        )
        found.append((rates, in_ram, draw.choice((0.0, draw.uniform(0, 2e-3))), from_disk))
    return found


def simulated(
    rates: ExpertRates,
    experts: list[ExpertLoad],
    moved: set[int],
    card_s: float,
    coming: list[ExpertLoad] | None = None,
    stays: bool = False,
) -> float:
    own, from_disk = (
        [(rates.processor_s(each.num_tokens), rates.card_s(each.num_tokens)) for each in kind]
        for kind in (experts, coming or [])
    )
    return experts_seconds(rates, own, moved, card_s, from_disk, stays)


def test_no_choice_of_experts_is_better() -> None:
    """Than the chosen number of those with the most tokens, of all sets of experts, with those from the disk
    on either lane, but for what the formula leaves out: the link may be done in the middle of an expert."""
    num_staying = 0
    for rates, experts, card_s, coming in layers(200):
        number, stays = rates.choose(experts, card_s, coming)
        mine = simulated(rates, experts, set(range(number)), card_s, coming, stays)
        every = range(len(experts))
        sets = itertools.chain.from_iterable(
            itertools.combinations(every, size) for size in range(len(experts) + 1)
        )
        best = min(
            simulated(rates, experts, set(chosen), card_s, coming, kind)
            for chosen in sets
            for kind in (False, True)
        )
        assert mine <= 1.05 * best
        moving_all = simulated(rates, experts, set(every), card_s, coming)
        assert mine <= 1.0001 * moving_all, "moving all is never faster"
        num_staying += stays
    assert 0.2 * 150 < num_staying < 0.8 * 150, "of the 150 layers or so to which experts come"


def test_seconds_are_those_of_virtual_time() -> None:
    for rates, experts, card_s, coming in layers(150):
        seconds = []
        for number, stays in itertools.product(range(len(experts) + 1), (False, True)):
            expected = simulated(rates, experts, set(range(number)), card_s, coming, stays)
            seconds.append(rates.layer_s(experts, number, card_s, coming, stays))
            assert seconds[-1] == pytest.approx(expected, rel=0.1)
        number, stays = rates.choose(experts, card_s, coming)
        assert rates.layer_s(experts, number, card_s, coming, stays) == pytest.approx(min(seconds))


def test_more_tokens_make_experts_move() -> None:
    rates = expert_rates(EXPERTS, MACHINE, 2)
    assert rates is not None
    moved = [rates.choose([ExpertLoad(each)] * 8).num_moved for each in (1, 2, 8, 16, 32, 64)]
    assert moved == sorted(moved) and 0 < moved[0] < 4 and moved[-1] >= 6


def test_the_processor_gets_no_more_than_the_card_has_room_for() -> None:
    rates = rates_of(1e6, 1e-3, 50, (40, 1e6), 1000)
    experts = [ExpertLoad(100.0)] * 10
    assert rates.choose(experts) == (10 - MOST_TOKENS // 100, False)
    rates = replace(rates, disk_bps=GB)
    assert rates.choose(experts[:3], 0.0, experts[:2]) == (0, True)
    assert rates.choose(experts[:5], 0.0, experts[:2]) == (2, True)
    assert not rates.choose(experts, 0.0, experts[:6]).stays


def test_one_expert_is_not_worth_two_crossings() -> None:
    rates = expert_rates(EXPERTS, MACHINE, 2)
    assert rates is not None and rates.move_s < rates.crossings_s + rates.processor_s(1)
    assert rates.choose([]) == (0, False) and rates.choose([ExpertLoad(1)]) == (1, False)


def test_what_comes_from_the_disk_stays_in_ram_where_the_link_is_slow() -> None:
    """The last expert is there when the disk has read it. On the card it is after one more move, on the
    processor after two crossings and a product."""
    coming = [ExpertLoad(1)] * 3
    for num_bytes, link_gbps, stays in ((2e6, 12, False), (2e6, 2, True), (5e7, 12, True)):
        rates = rates_of(num_bytes, link_gbps, 34, (34, 340), 150, 3)
        assert rates.choose([], 0.0, coming) == (0, stays)
        assert not replace(rates, disk_bps=0.0).choose([], 0.0, coming).stays, "the disk's rate is not known"


def test_unknown_rates_share_nothing() -> None:
    assert expert_rates(EXPERTS, replace(MACHINE, int8_gops=0.0), 1) is None
    assert expert_rates(EXPERTS, replace(MACHINE, device=None), 1) is None


def test_planned_experts_are_those_of_a_step() -> None:
    rates = expert_rates(EXPERTS, MACHINE, 2)
    assert rates is not None
    for num_tokens in (1, 8, 64):
        demand, _, num_passes, _ = planned_lanes(EXPERTS, rates, num_tokens, 1000, 6144)
        assert demand.num_in_ram <= num_passes <= 48 * min(MOST_TOKENS, 8 * num_tokens)
        assert demand.num_in_ram > 0 and demand.num_in_ram + demand.num_missing < demand.num_asked
        assert demand.num_from_disk == pytest.approx(0, abs=1e-6)
        some, *_ = planned_lanes(EXPERTS, rates, num_tokens, 1000, 3000)
        assert some.num_missing >= some.num_from_disk > 0 and some.num_in_ram < demand.num_in_ram
    whole, seconds, *_ = planned_lanes(EXPERTS, rates, 8, 6144, 6144)
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
        mine, theirs = (
            predict_step(plan, size, MACHINE, settings, StepLoad.decode(num_tokens)) for plan in plans
        )
        assert theirs.seconds / mine.seconds >= gain, (num_tokens, theirs.seconds, mine.seconds)
        assert mine.floor_s <= mine.seconds


@pytest.mark.inner
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
        number = rates.choose(missing, card_s).num_moved
        shared += simulated(rates, missing, set(range(number)), card_s) * 48 / num_layers
        moved += simulated(rates, missing, set(range(len(missing))), card_s) * 48 / num_layers
    demand, processor_s, *_ = planned_lanes(EXPERTS, rates, num_tokens, num_slots, EXPERTS.count)
    assert max(processor_s, demand.num_missing * rates.move_s) == pytest.approx(shared, rel=0.25)
    assert moved > gain * shared
