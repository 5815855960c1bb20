"""`penstock plan` and `penstock hardware`: what would lie where and how fast it would be, before a model is
loaded, downloaded or bought a card for."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig
from penstock.errors import CapacityError, ConfigError
from penstock.kernels import expected_traits
from penstock.measure import measure_hardware
from penstock.memory.cards import find_card
from penstock.memory.cost import StepPrediction, predict_step
from penstock.memory.hardware import DiskProfile, HardwareProfile
from penstock.memory.plan import CUDA_CONTEXT_BYTES, Home, MemoryPlan, gib, plan_memory
from penstock.model.known_shapes import find_shape
from penstock.model.registry import read_spec
from penstock.model.shapes import footprint
from penstock.spec import KV_LAYOUTS, ModelFootprint
from penstock.weights.formats import check_quantization, read_config
from penstock.weights.hub import find_config
from penstock_server.settings.settings import Settings

#: Sequences for which a step is predicted, and the length of a prompt.
NUM_SEQS, PROMPT = (1, 8, 32), 512
#: In the cache folder.
CACHE_FILE = "hardware.json"
#: Where none can be measured: what an ordinary NVMe drive delivers.
ASSUMED_DISK = DiskProfile(2.0, 4 << 20, 4, True)


def run_plan(settings: Settings, shape: str | None, card: str | None, is_json: bool) -> int:
    """Prints the plan. Raises PenstockError: CapacityError says what is the least that would work."""
    config, device = settings.engine_config(), find_card(card) if card is not None else None
    folder = None if shape else find_config(settings.model, settings.revision, settings.offline)
    size = footprint_of(read_config(folder) if folder else find_shape(shape or ""), config)
    hardware, assumptions = profile_or_assume(settings, folder or Path.cwd())
    if device is not None:
        hardware = dataclasses.replace(hardware, device=device)
    plan = estimated_plan(size, hardware, config)
    steps = predictions(plan, size, hardware, config)
    if is_json:
        print(json.dumps(as_data(plan, steps, hardware) | {"assumptions": assumptions}))
    else:
        lines = [*plan_table(plan), "", *step_table(steps), *hardware_lines(hardware), *assumptions]
        print("\n".join(lines))
    return 0


def estimated_plan(size: ModelFootprint, hardware: HardwareProfile, config: EngineConfig) -> MemoryPlan:
    """The plan for a model that is not loaded: activations are estimated. Raises CapacityError, as
    plan_memory() does."""
    traits = expected_traits(config, hardware.device is not None)
    return plan_memory(size, hardware, config, workspace_factor=traits.workspace_factor)


def footprint_of(config_json: dict[str, Any], config: EngineConfig) -> ModelFootprint:
    """What a plan must know of a model, from its config.json. Raises UnsupportedModel and InvalidConfig."""
    family, spec = read_spec(config_json)
    group_size, tensors = check_quantization(config_json) or config.group_size, family.model_tensors(spec)
    tensors = tensors.grouped(group_size) if group_size else tensors
    return footprint(spec, tensors, KV_LAYOUTS[config.kv_dtype])


def run_hardware(settings: Settings, folder: Path, is_json: bool, is_forced: bool) -> int:
    """Prints what this machine has and reaches."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    hardware = profile(settings, folder, is_forced, keeps_better=False)
    if is_json:
        print(json.dumps(dataclasses.asdict(hardware)))
    else:
        print("\n".join(hardware_lines(hardware)))
    return 0


def profile(
    settings: Settings,
    folder: Path | None,
    is_forced: bool = False,
    keeps_better: bool = True,
    measures_disk: bool = True,
) -> HardwareProfile:
    """This machine and the disk under `folder` (None: without); measuring takes some seconds the first
    time. measure_hardware() says what the flags are."""
    cache = settings.cache_dir / CACHE_FILE
    if is_forced or not cache.exists():
        print("measuring disk and memory, which takes some seconds", file=sys.stderr)
    config = settings.engine_config()
    return measure_hardware(folder, config, cache, is_forced, keeps_better, measures_disk)


def profile_or_assume(settings: Settings, folder: Path) -> tuple[HardwareProfile, list[str]]:
    """profile(), and what had to be assumed because it can't be measured."""
    try:
        return profile(settings, folder), []
    except (CapacityError, OSError) as error:
        hardware = profile(settings, None)
        reason = f"the disk under {folder} can't be measured ({error}): {ASSUMED_DISK.read_gbps} GB/s assumed"
        return dataclasses.replace(hardware, disk=ASSUMED_DISK), [reason]


def predictions(
    plan: MemoryPlan, size: ModelFootprint, hardware: HardwareProfile, config: EngineConfig
) -> dict[str, StepPrediction]:
    """Decode at several numbers of sequences, as far as the config allows and each has a block for its keys
    and values, and a prompt."""
    steps = {
        f"decode, {n} sequence{'s' if n > 1 else ''}": predict_step(plan, size, hardware, config, n, n)
        for n in NUM_SEQS
        if n <= min(config.max_num_seqs, plan.num_kv_blocks)
    }
    return steps | {f"prompt of {PROMPT}": predict_step(plan, size, hardware, config, PROMPT, 1)}


def as_data(plan: MemoryPlan, steps: dict[str, StepPrediction], hardware: HardwareProfile) -> dict[str, Any]:
    return {
        "plan": plan_data(plan),
        "steps": {name: step_data(step) for name, step in steps.items()},
        "hardware": dataclasses.asdict(hardware),
    }


def step_data(step: StepPrediction) -> dict[str, Any]:
    return dataclasses.asdict(step) | {"binding": step.binding}


def plan_data(plan: MemoryPlan) -> dict[str, Any]:
    """The plan with its sums."""
    return dataclasses.asdict(plan) | {
        "host_used_bytes": plan.host_used_bytes,
        "device_used_bytes": plan.device_used_bytes,
        "streamed_bytes": plan.streamed_bytes,
        "num_resident_layers": len(plan.resident),
        "num_kv_tokens": plan.num_kv_tokens,
    }


def plan_table(plan: MemoryPlan) -> list[str]:
    """Where everything lies, in bytes."""
    compute = "device" if plan.has_gpu else "host"
    rows = [
        ("embedding", "host", plan.embedding_bytes, ""),
        ("head", compute, plan.head_bytes, ""),
        *_layer_rows(plan, compute),
        (
            "staging",
            compute,
            plan.num_staging_slots * plan.staging_slot_bytes,
            f"{plan.num_staging_slots} slots",
        ),
    ]
    if plan.num_host_slots:
        size = plan.num_host_slots * plan.staging_slot_bytes
        rows.append(("staging", "host", size, f"{plan.num_host_slots} slots, on the way to the GPU"))
    rows += [
        ("keys and values", compute, plan.kv_bytes, f"{plan.num_kv_tokens} tokens"),
        ("activations", compute, plan.workspace_bytes, _workspace_text(plan)),
    ]
    if plan.has_gpu:
        rows.append(("CUDA context", "device", CUDA_CONTEXT_BYTES, "reserved"))
    lines = [
        f"{name:16} {home:7} {gib(num_bytes):>12}  {text}".rstrip() for name, home, num_bytes, text in rows
    ]
    lines.append(_budget("host", plan.host_used_bytes, plan.host_budget_bytes))
    if plan.has_gpu:
        lines.append(_budget("device", plan.device_used_bytes, plan.device_budget_bytes))
    return [*lines, *plan.notes, *plan.warnings]


def _workspace_text(plan: MemoryPlan) -> str:
    return "at the largest step, " + ("measured" if plan.is_workspace_measured else "estimated")


def _layer_rows(plan: MemoryPlan, compute: str) -> list[tuple[str, str, int, str]]:
    rows: list[tuple[str, str, int, str]] = []
    homes: tuple[Home, ...] = ("device", "host", "disk")
    for home in homes:
        number = sum(layer.home == home for layer in plan.layers)
        if number:
            text = "resident" if home == compute else "streamed in each step"
            rows.append((f"{number} layers", home, plan.layer_bytes(home), text))
    return rows


def _budget(name: str, used: int, budget: int) -> str:
    return f"{name}: {gib(used)} of a budget of {gib(budget)}"


def step_table(steps: dict[str, StepPrediction]) -> list[str]:
    """Predicted milliseconds and tokens per second, and what a step waits for."""
    lines = []
    for name, step in steps.items():
        num_tokens = step.num_tokens if step.num_tokens == step.num_sampled else PROMPT
        rate = num_tokens / step.seconds if step.seconds else float("inf")
        lines.append(
            f"{name:20} {step.seconds * 1e3:9.1f} ms  {rate:8.2f} tokens/s  waits for {step.binding}"
        )
    return [*lines, ""]


def hardware_lines(hardware: HardwareProfile) -> list[str]:
    lines = [
        f"{hardware.num_cores} cores, {hardware.ram_bytes / 2**30:.1f} GiB of memory, "
        f"{hardware.free_ram_bytes / 2**30:.1f} GiB free",
        f"memory {hardware.memory_read_gbps:.1f} GB/s, INT8 {hardware.int8_gops:.0f} GOPS (measured)",
    ]
    if hardware.disk is not None:
        disk = hardware.disk
        way = "direct" if disk.is_direct else "through the page cache"
        asked = f"{disk.block_bytes >> 20} MiB blocks, {disk.depth} in flight"
        lines.append(f"disk {disk.read_gbps:.2f} GB/s ({way}, {asked})")
    if hardware.device is not None:
        card = hardware.device
        lines.append(
            f"{card.name}: {card.total_bytes / 2**30:.0f} GiB, memory {card.memory_gbps:.0f} GB/s, from host "
            f"{card.host_to_device_gbps:.0f} GB/s, INT8 {card.int8_gops / 1000:.0f} TOPS"
        )
    return lines
