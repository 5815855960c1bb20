"""Plans of all known shapes on three machines, whose figures are given and not measured, against those that
are kept in kept_plans.json: where each layer lies, and how long steps take, within 2%. A change that should
change no plan fails here if it does. A change that should change plans makes the file anew:

    PYTHONPATH=engine:tests/engine python tests/engine/test_kept_plans.py
"""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from penstock.config import EngineConfig
from penstock.errors import CapacityError
from penstock.memory.hardware import DiskProfile, HardwareProfile
from penstock.memory.planning.cards import find_card
from penstock.memory.planning.cost import predict_step
from penstock.memory.planning.plan import MemoryPlan
from penstock.memory.planning.planner import plan_memory
from penstock.memory.planning.step_work import StepLoad
from penstock.model.footprint import footprint
from penstock.model.known_shapes import SHAPES, find_shape
from penstock.model.registry import find_family
from penstock.spec import ModelFootprint
from penstock.weights.store import planned_tensors

GIB = 1 << 30
FILE = Path(__file__).with_name("kept_plans.json")
TOLERANCE = 0.02
_DISK = DiskProfile(2.0, 4 << 20, 4, True)
#: Four cores with AVX2 and two channels of DDR4.
_PLAIN = HardwareProfile(
    4, 16 * GIB, 13 * GIB, 25.0, 500.0, _DISK,
    products=((2, 24.0), (16, 14.0), (64, 5.0), (512, 0.7)),
)  # fmt: skip
MACHINES = {
    "RAM": _PLAIN,
    "GTX 1060": replace(_PLAIN, device=find_card("GTX 1060")),
    "RTX 3060": replace(
        _PLAIN, ram_bytes=32 * GIB, free_ram_bytes=28 * GIB, products=(), device=find_card("RTX 3060 12 GB")
    ),
}
#: (tokens, sampled tokens, encoded tokens) of steps whose time is kept.
STEPS = ((1, 1, 0), (8, 8, 0), (48, 16, 0), (512, 1, 0), (1, 1, 200))
Weights = Literal["int8", "int4", "planes"]
#: Name of a case -> shape, weights, and what else the config says.
CASES: dict[str, tuple[str, Weights, dict[str, Any]]] = {
    **{name: (name, "int8", {}) for name in SHAPES},
    **{
        f"{name}, int4": (name, "int4", {})
        for name in ("solar-10.7b", "mixtral-8x7b", "qwen3-30b-a3b", "cpm-2")
    },
    **{f"{name}, planes": (name, "planes", {}) for name in ("solar-10.7b", "qwen3-14b")},
    "solar-10.7b, upper planes draft": ("solar-10.7b", "planes", {"draft_with_planes": True}),
    "solar-10.7b, one processor or card": ("solar-10.7b", "int8", {"share_products": "off"}),
    "solar-10.7b, activations in 8 bits": ("solar-10.7b", "int8", {"activations": "int8"}),
    "mixtral-8x7b, little memory": ("mixtral-8x7b", "int4", {"host_memory_bytes": 7 * GIB}),
}


@functools.lru_cache(maxsize=1)
def size_of(shape: str, weights: Weights) -> ModelFootprint:
    told = find_shape(shape)
    family = find_family(told)
    spec = family.read_spec(told)
    tensors = planned_tensors(family.model_tensors(spec), told, weights, None)
    return footprint(spec, tensors, spec.kv_layout("float16"))


def homes(plan: MemoryPlan) -> str:
    """The units' homes in the order of a sweep: d (device), h (host), k (disk); a capital where the unit is
    computed from that memory. A number says how often the letter after it comes."""
    letters = {"device": "d", "host": "h", "disk": "k"}
    names = (
        letters[layer.home].upper() if layer.is_resident else letters[layer.home] for layer in plan.layers
    )
    runs = ((len(list(same)), name) for name, same in itertools.groupby(names))
    return "".join(f"{count}{name}" if count > 1 else name for count, name in runs)


def described(shape: str, weights: Weights, config: dict[str, Any], machine: str) -> dict[str, Any] | None:
    """What is kept of a plan; None where the model has no room."""
    hardware, size = MACHINES[machine], size_of(shape, weights)
    settings = EngineConfig(num_kv_tokens=2048, kernels="native", weights=weights, **config)
    try:
        plan = plan_memory(size, hardware, settings)
    except CapacityError:
        return None
    return {
        "homes": homes(plan),
        "staging": [plan.num_staging_slots, plan.num_host_slots, plan.num_state_slots],
        "experts": [plan.num_expert_slots, plan.num_host_expert_slots, plan.shares_experts],
        "kept_share": plan.kept_share,
        "kv_blocks": plan.num_kv_blocks,
        "used": [plan.host_used_bytes, plan.device_used_bytes],
        "seconds": [
            float(f"{predict_step(plan, size, hardware, settings, StepLoad(*step)).seconds:.4g}")
            for step in STEPS
            if plan.num_encoder_layers or not step[2]
        ],
    }


@pytest.fixture(scope="module")
def kept() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    return found


def test_each_case_is_kept(kept: dict[str, dict[str, Any]]) -> None:
    assert {name: list(machines) for name, machines in kept.items()} == dict.fromkeys(CASES, list(MACHINES))


@pytest.mark.parametrize("case", CASES)
def test_plans_are_those_that_are_kept(case: str, kept: dict[str, dict[str, Any]]) -> None:
    for machine in MACHINES:
        found, expected = described(*CASES[case], machine), kept[case][machine]
        if found is not None and expected is not None:
            assert found.pop("seconds") == pytest.approx(expected.pop("seconds"), rel=TOLERANCE), machine
        assert found == expected, machine


def main() -> None:
    lines = (
        f"{json.dumps(case)}: " + json.dumps({machine: described(*told, machine) for machine in MACHINES})
        for case, told in CASES.items()
    )
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
