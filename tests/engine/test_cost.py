"""Step times from measured rates and from experience, against machines that are what the model says."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from penstock.config import EngineConfig
from penstock.generation.drafting.state_paths import StatePaths
from penstock.memory.hardware import DiskProfile, HardwareProfile
from penstock.memory.planning.cost import (
    ELEMENT_S,
    LAYER_OVERHEAD_S,
    UNKNOWN,
    MeasuredSteps,
    StepPrediction,
    predict_step,
)
from penstock.memory.planning.expert_demand import ExpertDemand
from penstock.memory.planning.planner import plan_memory
from penstock.memory.planning.step_work import StepLoad
from penstock.model.footprint import footprint
from penstock.model.known_shapes import find_shape
from penstock.model.registry import find_family
from penstock.spec import NO_EXPERTS, ExpertFootprint, ModelFootprint
from penstock.weights.formats.model_formats import in_codes

GIB = 1 << 30
MACHINE = HardwareProfile(
    2, 24 * GIB, 20 * GIB, 50.0, 2000.0, DiskProfile(4.0, 4 << 20, 2, True),
    products=((2, 50.0), (16, 25.0), (64, 12.5), (512, 1.9)),
)  # fmt: skip


def solar() -> ModelFootprint:
    family = find_family(config := find_shape("solar-10.7b"))
    spec = family.read_spec(config)
    return footprint(spec, family.model_tensors(spec))


def predicted(hardware: HardwareProfile, num_tokens: int, gib: int = 20, **config: object) -> StepPrediction:
    settings = EngineConfig(host_memory_bytes=gib * GIB, **config)  # type: ignore[arg-type]
    size = solar()
    return predict_step(
        plan_memory(size, hardware, settings), size, hardware, settings, StepLoad.decode(num_tokens)
    )


def test_a_product_takes_what_one_with_as_many_rows_was_measured_to_take() -> None:
    size = solar()
    num_bytes = sum(size.layer_bytes) + size.head_elements
    for num_tokens, gbps, activations in (
        (1, 50.0, "int16"), (8, 25.0, "int16"), (32, 12.5, "int16"), (16, 25.0, "int8"), (1, 50.0, "int8"),
        (4, 1 / (1 / 50 + (8 - 2) / (16 - 2) * (1 / 25 - 1 / 50)), "int16"),  # on the line between
        (512, 1.9 / 2, "int16"),  # beyond, in proportion
    ):  # fmt: skip
        step = predicted(MACHINE, num_tokens, activations=activations)
        other_s = 48 * LAYER_OVERHEAD_S + ELEMENT_S * num_tokens * size.layer_elements / size.hidden_size
        assert step.seconds - other_s == pytest.approx(num_bytes / gbps / 1e9, rel=1e-3)
        # The floor is what memory and arithmetic would take at their best.
        assert step.floor_s <= step.seconds


def test_four_bits_save_reading_and_no_arithmetic() -> None:
    family = find_family(config := find_shape("solar-10.7b"))
    tensors = in_codes(family.model_tensors(family.read_spec(config)), 64)
    size, settings = footprint(family.read_spec(config), tensors), EngineConfig(host_memory_bytes=20 * GIB)
    plan = plan_memory(size, MACHINE, settings)
    for num_tokens, least, most in ((1, 0.5, 0.55), (512, 0.97, 1.0)):
        step = predict_step(plan, size, MACHINE, settings, StepLoad(num_tokens, 1))
        int8 = predict_step(
            plan_memory(solar(), MACHINE, settings), solar(), MACHINE, settings, StepLoad(num_tokens, 1)
        )
        assert least < step.products_s / int8.products_s < most


@pytest.mark.parametrize("activations", ["int16", "int8"])
def test_more_tokens_never_take_less(activations: str) -> None:
    """The scheduler relies on it."""
    size = solar()
    settings = EngineConfig(host_memory_bytes=20 * GIB, activations=activations)  # type: ignore[arg-type]
    plan = plan_memory(size, MACHINE, settings)
    steps = [
        predict_step(plan, size, MACHINE, settings, StepLoad(n, min(n, 32))).seconds for n in range(1, 600)
    ]
    assert steps == sorted(steps)


def test_the_floor_is_memory_or_arithmetic_at_its_best() -> None:
    size = solar()
    for num_tokens, binding in ((1, "memory"), (8, "memory"), (16, "arithmetic"), (64, "arithmetic")):
        step = predicted(MACHINE, num_tokens)
        rates = {"memory": 50e9, "arithmetic": 2000e9 / 4 / num_tokens}  # two rows, two operations
        assert step.binding == binding
        num_bytes = size.layer_elements + size.head_elements
        assert step.floor_s == pytest.approx(num_bytes / rates[binding], rel=1e-2)


def test_computing_and_streaming_overlap() -> None:
    streamed, faster = predicted(MACHINE, 1, 6), predicted(replace(MACHINE, products=()), 1, 6)
    assert streamed.binding == "disk" and streamed.seconds == faster.seconds
    assert predicted(MACHINE, 64, 10).seconds > predicted(MACHINE, 64, 20).seconds > streamed.floor_s


def test_a_step_does_not_wait_for_a_disk_that_is_done_before_its_products() -> None:
    """As on a machine without a compiler: a faster disk would not help."""
    for products, binding in (((), "disk"), (((2, 3.0), (512, 0.5)), "memory")):
        step = predicted(replace(MACHINE, products=products), 1, 8)
        assert max(step.terms, key=step.terms.__getitem__) == "disk"
        assert (step.binding, step.seconds > 2 * step.floor_s) == (binding, bool(products))


def tokens_after(steps: MeasuredSteps, limit_s: float, floor_s: float, token_s: float, num_steps: int) -> int:
    """The step's size when one has taken as many tokens as were predicted to fit, so many times."""
    num_tokens = 8
    for _ in range(num_steps):
        steps.record(num_tokens, max(floor_s, num_tokens * token_s))
        allowed_s = max(limit_s, steps.predict_s(1))
        num_tokens = max(n for n in range(1, 1000) if n == 1 or steps.predict_s(n) <= allowed_s)
    return num_tokens


@pytest.mark.parametrize(
    ("limit_s", "floor_s", "best"),
    [
        (1.0, 0.2, 100),  # 100 tokens of 10 ms
        (0.0, 2.0, 200),  # as much as the floor hides
        (4.0, 2.0, 400),
    ],
)
def test_it_finds_how_many_tokens_fit(limit_s: float, floor_s: float, best: int) -> None:
    found = tokens_after(MeasuredSteps(), limit_s, floor_s, 0.01, 40)
    assert best * 0.8 <= found <= best * 1.5


def test_one_slow_step_is_forgotten() -> None:
    steps = MeasuredSteps()
    tokens_after(steps, 1.0, 0.2, 0.01, 20)
    steps.record(60, 9.0)
    assert steps.predict_s(100) > 2.0
    assert 80 <= tokens_after(steps, 1.0, 0.2, 0.01, 20) <= 150


def test_a_floor_that_rises_is_believed_in_the_end() -> None:
    steps = MeasuredSteps()
    tokens_after(steps, 0.0, 1.0, 0.01, 30)
    for _ in range(30):
        steps.record(8, 3.0)
    assert 2.5 < steps.predict_s(1) <= 3.0
    assert 240 <= tokens_after(steps, 0.0, 3.0, 0.01, 30) <= 450


def test_it_never_falls_with_more_tokens_and_knows_nothing_at_first() -> None:
    steps = MeasuredSteps()
    assert steps.predict_s(100) == 0.0
    steps.record(50, 1.0)
    times = [steps.predict_s(n) for n in range(1, 200)]
    assert times == sorted(times) and times[0] == 1.0


@pytest.mark.parametrize("products", [(), ((1, 20.0), (64, 2.0))])
def test_a_path_of_guesses_reads_and_writes_the_states_once_more(
    products: tuple[tuple[int, float], ...],
) -> None:
    """50 MB, at 20 GB/s."""
    size, settings = replace(solar(), state_bytes=50 * 10**6, guess_bytes=10**5), EngineConfig()
    hardware = HardwareProfile(2, 64 * GIB, 64 * GIB, 20.0, 10**6, None, products=products)
    plan = plan_memory(size, hardware, settings)
    paths = StatePaths.of(plan, functools.partial(predict_step, plan, size, hardware, settings))
    assert paths.seconds == pytest.approx(5e-3) and paths.room == plan.guess_room.num_rows > 0
    assert StatePaths.of(replace(plan, num_state_slots=0), lambda load: UNKNOWN).seconds == 0


# ------------------------------------------------------------ experts

#: 10 layers of 64 experts, of which a token passes through 4. An expert has 1 MB.
EXPERTS = ExpertFootprint(10**6, 10**6, 640, 40, 64)


def mixture_step(
    num_slots: int, num_tokens: int = 1, demand: ExpertDemand | None = None, disk: float = 2.0
) -> StepPrediction:
    """Two GB of everything else, which is resident; memory 20 GB/s."""
    size = replace(solar(), layer_bytes=(2 * 10**8,) * 10, head_bytes=0, head_elements=0, experts=EXPERTS)
    hardware = HardwareProfile(2, 64 * GIB, 64 * GIB, 20.0, 10**6, DiskProfile(disk, 1 << 20, 8, True))
    config = EngineConfig(num_kv_tokens=4096)
    plan = plan_memory(replace(size, experts=NO_EXPERTS), hardware, config)
    plan = replace(plan, num_expert_slots=num_slots, expert_slot_bytes=10**6)
    return predict_step(plan, size, hardware, config, StepLoad(num_tokens, 1, 0, demand))


def test_missing_experts_are_read_after_their_router() -> None:
    """100 ms for everything else, and then 20 MB from the disk in 10 ms."""
    step = mixture_step(320, demand=ExpertDemand(40, 20, 20))
    assert step.terms["disk"] == pytest.approx(0.01)
    assert step.terms["experts"] == pytest.approx(0.11) == step.floor_s
    assert step.binding == "experts" and step.experts.hit_rate == 0.5
    slow = mixture_step(320, demand=ExpertDemand(40, 20, 20), disk=0.1)
    assert slow.floor_s == pytest.approx(0.3)


def test_more_slots_hit_more_and_more_tokens_share_experts() -> None:
    rates = [mixture_step(slots).experts.hit_rate for slots in (20, 80, 160, 320, 640)]
    assert rates == sorted(rates) and rates[-1] == 1.0 and rates[0] < 0.4
    assert "experts" not in mixture_step(640).terms
    one, eight = mixture_step(320).experts, mixture_step(320, 8).experts
    assert one.num_asked == pytest.approx(40) and 40 < eight.num_asked < 8 * 40
