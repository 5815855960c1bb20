"""How products are divided between a card and the processor: the closed formula against a simulation, and
what plans make of it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import lane_simulation
import pytest

from penstock.config import EngineConfig
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.cards import find_card
from penstock.memory.planning.cost import predict_step
from penstock.memory.planning.planner import plan_memory
from penstock.memory.planning.product_split import ROW_UNIT, SplitStep, part_rows, whole_share
from penstock.memory.planning.split_cost import split_work
from penstock.memory.planning.step_work import StepLoad
from penstock.model.footprint import footprint
from penstock.model.known_shapes import find_shape
from penstock.model.registry import find_family

GB = 1e9
#: SOLAR-10.7B: 48 layers of 4 products that wait for each other.
LAYERS, PRODUCTS = 48, 4


def solar_on_a_gtx_1060(num_tokens: int) -> SplitStep:
    """4.5 of 10.5 GB in the card's memory; six cores with AVX2."""
    operations = 2 * 2 * num_tokens  # of each byte of weights: 16-bit activations are two rows
    return SplitStep(
        kept_bytes=4.5 * GB,
        rest_bytes=6 * GB,
        link_bps=12 * GB,
        memory_bps=40 * GB,
        card_bps=min(154 * GB, 4.9e12 / operations),
        processor_bps=min(34 * GB, 1.8e12 / operations),
        crossings_s=LAYERS * PRODUCTS * 30e-6,
    )


def simulated(step: SplitStep, share: float) -> float:
    return lane_simulation.step_seconds(step, share, LAYERS, PRODUCTS)


@pytest.mark.parametrize("link_share", [1.0, 0.5])
@pytest.mark.parametrize("experts_s", [(0.0, 0.0), (0.1, 0.0), (0.1, 0.05), (0.3, 0.3)])
@pytest.mark.parametrize("num_tokens", [1, 8, 16, 32, 64, 128])
def test_the_formula_finds_the_best_share_of_a_simulated_step(
    num_tokens: int, experts_s: tuple[float, float], link_share: float
) -> None:
    """Shares are tried one by one. Streaming alone is the share of 1, without crossings. `experts_s`: for
    which the step waits for experts, and for which the link brings some. `link_share`: the card has the other
    half of what would be streamed."""
    step = solar_on_a_gtx_1060(num_tokens)
    step = replace(step, other_s=experts_s[0], moved_bytes=experts_s[1] * step.link_bps)
    step = replace(step, link_share=link_share)
    found = simulated(step, whole_share(step.best_share()))
    best = min(simulated(step, share / 40) for share in range(41))
    alone = simulated(step, 1.0)
    assert found <= 1.05 * best
    assert found <= alone
    assert found == pytest.approx(step.seconds(step.best_share()), rel=0.05)
    if num_tokens <= 16 and not experts_s[0]:
        assert alone / found >= (3 if link_share == 1 else 2)


def test_streaming_alone_takes_what_its_link_takes() -> None:
    assert simulated(solar_on_a_gtx_1060(1), 1.0) == pytest.approx(0.5, rel=5e-3)
    assert solar_on_a_gtx_1060(1).seconds(1.0) == pytest.approx(0.5)


def test_no_share_is_better_than_the_closed_form() -> None:
    """Of any machine: weak and strong processors, links and memories."""
    draw = random.Random(0)
    for _ in range(300):
        other_s, link = draw.choice((0.0, draw.uniform(0, 0.1))), draw.uniform(0.5, 60) * GB
        step = SplitStep(
            kept_bytes=draw.choice((0.0, draw.uniform(0, 20) * GB)),
            rest_bytes=draw.uniform(0.01, 20) * GB,
            link_bps=link,
            memory_bps=draw.choice((float("inf"), draw.uniform(5, 200) * GB)),
            card_bps=draw.uniform(1, 2000) * GB,
            processor_bps=draw.uniform(0.1, 200) * GB,
            other_s=other_s,
            crossings_s=draw.choice((0.0, draw.uniform(0, 0.05))),
            launches_s=draw.choice((0.0, draw.uniform(0, 0.05))),
            moved_bytes=draw.uniform(0, 1) * other_s * link,
            link_share=draw.choice((1.0, draw.uniform(0.4, 0.6))),
        )
        assert step.seconds(step.best_share()) <= 1.0001 * min(step.seconds(i / 200) for i in range(201))


def test_more_tokens_leave_less_to_a_weak_processor() -> None:
    shares = [solar_on_a_gtx_1060(num_tokens).best_share() for num_tokens in (16, 32, 64)]
    assert all(fewer < more for fewer, more in pairwise(shares))


def test_a_processor_that_brings_nothing_gets_nothing() -> None:
    step = SplitStep(0, 1 * GB, 12 * GB, 40 * GB, 100 * GB, 0.01 * GB, crossings_s=0.01)
    assert whole_share(step.best_share()) == 1.0


def test_what_sharing_costs_decides_between_sharing_and_streaming() -> None:
    """A fast link, as an H200's, and a card that waits for launches: streaming alone is as fast. The same
    launches are worth while where the link is slow."""
    fast = SplitStep(5 * GB, 5 * GB, 50 * GB, 200 * GB, 3000 * GB, 100 * GB, other_s=0.01, crossings_s=0.01)
    slow = replace(fast, link_bps=10 * GB)
    assert fast.best_share() < 1 and fast.seconds(fast.best_share()) < fast.seconds(1.0)
    late = replace(fast, launches_s=0.09)
    assert late.best_share() == 1.0 and late.seconds(1.0) == fast.seconds(1.0)
    assert replace(slow, launches_s=0.09).best_share() < 1
    share = slow.best_share()
    assert replace(slow, launches_s=0.003).seconds(share) == pytest.approx(
        replace(slow, crossings_s=0.013).seconds(share)
    )


def test_measured_launches_are_part_of_a_plan() -> None:
    """A card on which a launch takes long streams alone; a plan says what hand-overs and launches take."""
    card, told = find_card("GTX 1060"), find_shape("solar-10.7b")
    family = find_family(told)
    spec = family.read_spec(told)
    size, settings = footprint(spec, family.model_tensors(spec)), EngineConfig(num_kv_tokens=4096)
    shares, notes = [], []
    for launch_s in (0.0, 4e-6, 1e-3):
        hardware = HardwareProfile(
            6, 16 << 30, 14 << 30, 40.0, 1800.0, None, replace(card, crossing_s=30e-6, launch_s=launch_s)
        )
        plan = plan_memory(size, hardware, settings)
        work = split_work(plan, size, hardware, settings, 1)
        assert work is None or work.step.launches_s == pytest.approx(192 * 3 * launch_s)
        shares.append(None if work is None or plan.kept_share is None else work.share)
        notes += [note for note in plan.notes if "share each product" in note]
    assert shares[0] is not None and shares[0] <= shares[1] < 1 and shares[2] in (None, 1.0)
    assert "hand-overs and launches have 5.8 ms" in notes[0] and "have 8.1 ms of it" in notes[1]


def test_a_plan_of_a_gtx_1060() -> None:
    """The card's memory is as full as without sharing, RAM has the rest, and the plan says what it brings."""
    card, told = find_card("GTX 1060"), find_shape("solar-10.7b")
    hardware = HardwareProfile(6, 16 << 30, 14 << 30, 40.0, 1800.0, None, card)
    family = find_family(told)
    spec = family.read_spec(told)
    size, settings = footprint(spec, family.model_tensors(spec)), EngineConfig(num_kv_tokens=4096)
    shared, streamed = plans = [
        plan_memory(size, hardware, each) for each in (settings, replace(settings, share_products="off"))
    ]
    assert shared.kept_share is not None and streamed.kept_share is None
    assert shared.layer_bytes("device") >= 0.95 * streamed.layer_bytes("device")
    assert shared.device_used_bytes <= card.total_bytes and not shared.at_home("disk")
    assert sum(layer.num_bytes for layer in shared.layers) == pytest.approx(sum(size.layer_bytes), rel=1e-3)
    (note,) = (note for note in shared.notes if "share each product" in note)
    assert "--share-products off" in note
    for num_tokens, gain in ((1, 2.8), (16, 2.8), (64, 1.2), (512, 1.2)):
        mine, theirs = (
            predict_step(plan, size, hardware, settings, StepLoad.decode(num_tokens)) for plan in plans
        )
        assert theirs.seconds / mine.seconds >= gain and mine.processor_share > 0


def test_parts_are_whole_units_of_channels() -> None:
    assert part_rows(14336, 0.3) == 4288 and part_rows(14336, 0.3) % ROW_UNIT == 0
    assert part_rows(1000, 1.0) == 1000
    assert part_rows(1000, 0.0) == part_rows(15, 0.9) == 0
