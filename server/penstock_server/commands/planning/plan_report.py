"""`penstock plan` and `penstock hardware`: what lies in which memory and how fast a step is, predicted before
anybody loads a model, downloads it, or buys a card for it."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.generation.drafting.state_paths import StatePaths
from penstock.memory import kept_uses
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.cost import StepPrediction, predict_step
from penstock.memory.planning.kv_blocks import check_context, context, num_together
from penstock.memory.planning.plan import MemoryPlan, gib
from penstock.memory.planning.splits_in_ram import SpilledKeys
from penstock.memory.planning.step_work import StepLoad
from penstock.model.known_shapes import find_shape
from penstock.model.pooling.find_pooling import find_pooling, wish_of
from penstock.model.pooling.pooling_config import pooling_config
from penstock.model.registry import read_pooled_spec
from penstock.spec import ModelFootprint
from penstock.weights.adapters.loaded_adapters import with_adapter_bytes
from penstock.weights.checkpoints.formats import read_config
from penstock.weights.conversion.fitted_formats import BitBudget
from penstock_server.commands.planning.drafted_pair import check_pair
from penstock_server.commands.planning.footprints import described_at, described_shape
from penstock_server.commands.planning.other_machine import OtherMachine
from penstock_server.commands.planning.planned_draft import (
    PlannedDraft,
    assumed_beside,
    planned_draft,
    planned_head,
)
from penstock_server.facade.expected_drafts import (
    NUM_SEQS,
    draft_model_line,
    drafting_table,
    expected_drafts,
)
from penstock_server.facade.figures import duration, rate
from penstock_server.facade.inside import hardware_body, plan_body, step_body
from penstock_server.facade.loading import engine_config, find_config_folder
from penstock_server.facade.machine import hardware_lines, profile, profile_or_assume
from penstock_server.facade.needs import estimated_plan
from penstock_server.facade.plan_table import plan_table
from penstock_server.protocol.engine_bodies import DraftingBody
from penstock_server.settings.settings import Settings

#: The tokens of the prompt for which a step is predicted.
PROMPT = 512
#: More memory, of which a plan says what it would bring.
MORE_BYTES = 4 << 30


def run_plan(
    settings: Settings,
    shape: str | None,
    other: OtherMachine,
    price_per_hour: float | None,
    is_json: bool,
    budget: BitBudget | None = None,
) -> int:
    """Prints the plan, with a budget that of what `convert` would make. `price_per_hour` is the price of the
    machine, in any currency. Raises PenstockError; a CapacityError says the least memory that would
    work."""
    config = with_adapter_bytes(engine_config(settings))
    folder = None if shape else find_config_folder(settings)
    size, notes = (
        described_at(folder, config, budget)
        if folder
        else described_shape(find_shape(shape or ""), config, budget)
    )
    config = pooled_config(folder, config) if folder else config
    check_context(config, size)
    check_pair(folder, shape, config, settings.offline)
    hardware, assumptions = profile_or_assume(settings, folder or Path.cwd())
    assumptions += notes
    if folder and size.experts.count:
        size, notes = with_kept_uses(size, settings.cache_dir, folder)
        assumptions += notes
    hardware, notes = other.in_place_of(hardware)
    assumptions += notes
    draft = None
    if config.speculation != "off":
        draft = planned_draft(settings, hardware, config)
        if draft is None and (folder is None or not folder.is_file()):
            text = read_config(folder) if folder else find_shape(shape or "")
            draft = planned_head(text, hardware, config)
    if draft is not None:
        assumptions += without_draft(size, hardware, config)
        config, hardware = draft.beside(config, hardware)
    plan = estimated_plan(size, hardware, config)
    steps = predictions(plan, size, hardware, config)
    drafting = expected_drafting(plan, size, hardware, config, draft)
    prices = {} if price_per_hour is None else million_token_prices(steps, price_per_hour)
    more = with_more_memory(plan, size, hardware, config)
    if is_json:
        data = as_data(plan, steps, hardware) | {"assumptions": assumptions}
        data |= {"more_memory": more} if more else {}
        data["drafting"] = [each.model_dump() for each in drafting]
        data |= {"draft_model": plan_body(draft.plan).model_dump()} if draft is not None else {}
        print(json.dumps(data | ({"price_per_million_tokens": prices} if prices else {})))
    else:
        lines = [
            *plan_table(plan_body(plan)),
            *([draft_model_line(*draft.used_bytes)] if draft is not None else []),
            "",
            *step_table(steps, prices),
            *([*drafting_table(drafting), ""] if drafting else []),
            *expert_lines(size, next(iter(steps.values())), more),
            *hardware_lines(hardware, "assumed" if other.processor else "measured"),
            *assumptions,
        ]
        print("\n".join(lines))
    return 0


def without_draft(size: ModelFootprint, hardware: HardwareProfile, config: EngineConfig) -> list[str]:
    """A line with a step of one sequence if the draft model left its memory to the model's own layers."""
    step = predict_step(estimated_plan(size, hardware, config), size, hardware, config, StepLoad.decode(1))
    if not step.seconds:
        return []
    return [
        f"without the draft model, whose memory layers would have, a step of 1 sequence takes "
        f"{duration(step.seconds)}: {rate(1 / step.seconds)} tokens/s"
    ]


def expected_drafting(
    plan: MemoryPlan,
    size: ModelFootprint,
    hardware: HardwareProfile,
    config: EngineConfig,
    draft: PlannedDraft | None,
) -> tuple[DraftingBody, ...]:
    """What drafts should bring to the plan's steps."""
    if config.speculation == "off":
        return ()

    predict = functools.partial(predict_step, plan, size, hardware, config)

    @functools.cache
    def predict_s(num_tokens: int) -> float:
        return predict(StepLoad.decode(num_tokens)).seconds

    drafters = assumed_beside(plan, predict, config, draft)
    most, paths = num_together(plan, context(size, config), config), StatePaths.of(plan, predict)
    return expected_drafts(predict_s, config, most, drafters, paths)


def pooled_config(path: Path, config: EngineConfig) -> EngineConfig:
    """The config with which the model of a folder is loaded: see pooling_config()."""
    told = {} if path.is_file() else read_config(path)
    pooling = find_pooling(path, told, wish_of(config)) if told else None
    return config if pooling is None else pooling_config(config, read_pooled_spec(told, pooling)[1], pooling)


def with_kept_uses(size: ModelFootprint, cache: Path, model: Path) -> tuple[ModelFootprint, list[str]]:
    """The footprint with the popularity of experts that the model's runs on this machine have shown, and a
    line that says so."""
    found = kept_uses.learned(size, kept_uses.read(kept_uses.path_of(cache, model)))
    if not found.experts.weights:
        return size, []
    return found, ["experts are assumed to be as popular as they were in this machine's runs of the model"]


def run_hardware(settings: Settings, folder: Path, is_json: bool, is_forced: bool) -> int:
    """Prints the capacities and the measured rates of this machine."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    hardware = profile(settings, folder, is_forced, keeps_better=False)
    if is_json:
        print(json.dumps(hardware_body(hardware).model_dump()))
    else:
        print("\n".join([*hardware_lines(hardware), *hardware.notes]))
    return 0


def predictions(
    plan: MemoryPlan, size: ModelFootprint, hardware: HardwareProfile, config: EngineConfig
) -> dict[str, StepPrediction]:
    """Predicted steps: a decoding step for each number of sequences, as far as so many fit, one of the
    longest sequence with all its spilled blocks, and a step with a prompt."""
    most = num_together(plan, context(size, config), config)
    steps = {
        f"decode, {n} sequence{'s' if n > 1 else ''}": predict_step(
            plan, size, hardware, config, StepLoad.decode(n)
        )
        for n in dict.fromkeys(min(each, most) for each in NUM_SEQS)
    }
    if plan.num_spilled_blocks:
        longest = min(plan.num_kv_tokens, context(size, config))
        num_spilled, token_bytes = min(plan.num_spilled_tokens, longest), size.kv_bytes_per_token
        spilled = SpilledKeys.of_one(num_spilled, longest, token_bytes, plan.attends_in_ram)
        steps[f"decode at {longest} tokens"] = predict_step(
            plan, size, hardware, config, StepLoad(1, 1, 0, None, *spilled.parts(1))
        )
    tokens = (1, 1, PROMPT) if plan.num_encoder_layers else (PROMPT, 1)
    return steps | {f"prompt of {PROMPT}": predict_step(plan, size, hardware, config, StepLoad(*tokens))}


def with_more_memory(
    plan: MemoryPlan, size: ModelFootprint, hardware: HardwareProfile, config: EngineConfig
) -> dict[str, float]:
    """What MORE_BYTES of memory where layers are computed would bring to a model with experts that don't all
    fit. {} for other models."""
    if plan.num_expert_slots >= size.experts.count:
        return {}
    if plan.has_gpu:
        larger = dataclasses.replace(config, device_memory_bytes=plan.device_budget_bytes + MORE_BYTES)
    else:
        larger = dataclasses.replace(config, host_memory_bytes=plan.host_budget_bytes + MORE_BYTES)
    step = predict_step(estimated_plan(size, hardware, larger), size, hardware, larger, StepLoad.decode(1))
    rate = 1 / step.seconds if step.seconds else 0.0
    return {"num_bytes": MORE_BYTES, "hit_rate": step.experts.hit_rate, "tokens_per_s": rate}


def expert_lines(size: ModelFootprint, step: StepPrediction, more: dict[str, float]) -> list[str]:
    """For people: the experts of a step of one token, and what more memory would bring."""
    demand = step.experts
    if not demand.num_asked:
        return []
    source = "as it was learned" if size.experts.weights else "as is usual"
    missing = gib(demand.num_missing * size.experts.num_bytes)
    in_ram = demand.num_in_ram / demand.num_asked
    beside = f" ({in_ram:.0%} in RAM, for the processor)" if in_ram else ""
    lines = [
        f"experts: a token passes through {demand.num_asked:.0f} of {size.experts.count}; by their "
        f"popularity, {source}, {demand.hit_rate:.0%} of these are in memory{beside}, and {missing} are read"
    ]
    if more:
        gained = f" and {rate(more['tokens_per_s'])} tokens/s" if more["tokens_per_s"] else ""
        lines.append(f"{gib(more['num_bytes'])} more memory: {more['hit_rate']:.0%} in memory{gained}")
    return [*lines, ""]


def as_data(plan: MemoryPlan, steps: dict[str, StepPrediction], hardware: HardwareProfile) -> dict[str, Any]:
    return {
        "plan": plan_body(plan).model_dump(),
        "steps": {name: step_body(step).model_dump() for name, step in steps.items()},
        "hardware": hardware_body(hardware).model_dump(),
    }


def million_token_prices(steps: dict[str, StepPrediction], price_per_hour: float) -> dict[str, float]:
    """What a million tokens of each step cost on a machine of this price that has no idle hour. A decoding
    step makes tokens of answers; a step with a prompt reads tokens of prompts."""
    per_second = price_per_hour / 3600
    return {
        name: per_second * step.seconds / (step.num_encoded or step.num_tokens) * 1e6
        for name, step in steps.items()
        if step.num_tokens  # 0 where no rate is known
    }


def step_table(steps: dict[str, StepPrediction], prices: dict[str, float]) -> list[str]:
    """A line for each step: the predicted time, tokens per second, the price of a million tokens if there
    is one, and the resource that limits the step."""
    lines, width = [], max(20, *map(len, steps))
    for name, step in steps.items():
        tokens_per_s = (step.num_encoded or step.num_tokens) / step.seconds if step.seconds else math.inf
        price = f"  {prices[name]:9.2f} per million tokens" if name in prices else ""
        lines.append(
            f"{name:{width}} {duration(step.seconds):>9}  {rate(tokens_per_s):>8} tokens/s{price}  "
            f"waits for {step.binding}"
        )
    return [*lines, ""]
