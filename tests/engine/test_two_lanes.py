"""Which plans have a card and the processor compute together: well-known mixtures on a GTX 1060."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from penstock.config import EngineConfig
from penstock.memory.hardware import DiskProfile, HardwareProfile
from penstock.memory.planning.cards import find_card
from penstock.memory.planning.cost import predict_step
from penstock.memory.planning.plan import MemoryPlan
from penstock.memory.planning.planner import plan_memory
from penstock.memory.planning.step_work import StepLoad
from penstock.model.footprint import footprint
from penstock.model.known_shapes import find_shape
from penstock.model.registry import find_family
from penstock.spec import ModelFootprint
from penstock.weights.store import planned_tensors

GIB = 1 << 30
DISK = DiskProfile(3.0, 1 << 20, 4, True)
#: Six cores with AVX2 and two channels of DDR4.
MACHINE = HardwareProfile(6, 128 * GIB, 120 * GIB, 34.0, 1800.0, DISK, find_card("GTX 1060"))


def size_of(shape: str, weights: Literal["int4", "int8", "planes"]) -> ModelFootprint:
    told = find_shape(shape)
    family = find_family(told)
    spec = family.read_spec(told)
    return footprint(spec, planned_tensors(family.model_tensors(spec), told, weights, None))


def planned(
    size: ModelFootprint, settings: EngineConfig, hardware: HardwareProfile = MACHINE
) -> tuple[MemoryPlan, MemoryPlan]:
    """With the processor and without."""
    return (
        plan_memory(size, hardware, settings),
        plan_memory(size, hardware, replace(settings, share_products="off")),
    )


def gain(plans: tuple[MemoryPlan, MemoryPlan], size: ModelFootprint, settings: EngineConfig) -> float:
    mine, theirs = (predict_step(plan, size, MACHINE, settings, StepLoad.decode(1)) for plan in plans)
    assert mine.floor_s <= mine.seconds
    return theirs.seconds / mine.seconds


def test_a_mixture_shares_products_and_experts() -> None:
    """GLM-4.5-Air in INT8: its dense layers alone are larger than the card."""
    size, settings = size_of("glm-4.5-air", "int8"), EngineConfig(num_kv_tokens=2048)
    plans = shared, alone = planned(size, settings)
    assert shared.kept_share is not None and shared.shares_experts and alone.streamed_bytes > GIB
    assert shared.device_used_bytes <= shared.device_budget_bytes
    assert shared.host_used_bytes <= shared.host_budget_bytes and not shared.at_home("disk")
    for note in ("the card and the processor share each product", "computes experts that lie in RAM"):
        assert sum(note in each for each in shared.notes) == 1
    assert gain(plans, size, settings) > 2
    step = predict_step(shared, size, MACHINE, settings, StepLoad.decode(1))
    experts_alone = size.experts.num_bytes * step.experts.num_in_ram
    total = sum(size.layer_bytes) + size.experts.num_bytes * step.experts.num_asked
    assert step.processor_share > 1.2 * experts_alone / total, "the processor has dense products as well"


@pytest.mark.inner
def test_a_mixture_whose_dense_layers_fit_shares_experts_alone() -> None:
    size, settings = size_of("qwen3-30b-a3b", "int4"), EngineConfig(num_kv_tokens=4096)
    shared, _ = planned(size, settings)
    assert shared.shares_experts and shared.kept_share is None


@pytest.mark.parametrize(("disk", "stays"), [(DISK, True), (None, False)])
def test_large_experts_from_the_disk_are_computed_in_ram(disk: DiskProfile | None, stays: bool) -> None:
    """Mixtral's have 99 MB in 4 bits: moving one takes as long as computing three in RAM. Where the disk's
    rate is not known, they go on to the card."""
    size = size_of("mixtral-8x7b", "int4")
    settings = EngineConfig(num_kv_tokens=2048, host_memory_bytes=16 * GIB)
    hardware = replace(MACHINE, disk=disk)
    plans = planned(size, settings, hardware)
    assert plans[0].shares_experts
    assert plans[0].host_used_bytes <= plans[0].host_budget_bytes
    demand = predict_step(plans[0], size, hardware, settings, StepLoad.decode(1)).experts
    assert demand.num_from_disk > 0 and (demand.num_from_disk > 1.01 * demand.num_missing) == stays
    if stays:
        assert gain(plans, size, settings) > 1.1
