"""`penstock bench`: the speed of this machine with a model, or with random weights of a model's shape.

Each measured step stands beside the plan's prediction, and beside the floor: the least time that the rates of
disk, memory and arithmetic allow, measured in the same run.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from penstock import Engine, GenerationRequest, SamplingParams
from penstock.config import CODE_GROUP_SIZES, EngineConfig
from penstock.errors import ConfigError
from penstock.memory.hardware import HardwareProfile
from penstock.model.known_shapes import find_shape
from penstock.model.shapes import write_random
from penstock.spec import ModelFootprint
from penstock.text.tokenizer import NoText
from penstock_server.commands.bench_drafts import check_drafts, measure_drafts
from penstock_server.commands.bench_report import BenchReport, Measurement
from penstock_server.commands.converting import ProgressBar
from penstock_server.commands.planning.footprints import footprint_at
from penstock_server.facade.inside import (
    draw_routing,
    expert_slots_are_full,
    has_experts,
    longest_in_a_step,
    longest_sequence,
    model_of,
    predicted_step,
    served_plan_of,
    snapshot_of,
)
from penstock_server.facade.loading import engine_config, find_folder, spare_the_collector
from penstock_server.facade.machine import profile
from penstock_server.facade.needs import estimated_plan
from penstock_server.settings.settings import Settings

#: Tokens of each sequence before the timed steps, the number of timed steps, and tokens of the timed prompt.
CONTEXT, NUM_STEPS, PROMPT = 16, 5, 512
#: Timed steps of a model with experts: each step has other experts.
NUM_EXPERT_STEPS = 24
#: Most steps in which the slots of experts are filled.
MOST_FILLING_STEPS = 200


def run_bench(
    settings: Settings,
    shape: str | None,
    sequences: tuple[int, ...],
    with_prompt: bool,
    is_json: bool,
    popularity: str | None = None,
    with_drafts: bool = False,
) -> int:
    """Measures, and before that writes a random model of the shape if there is none yet. Routers choose
    experts by `popularity`: "usual", "uniform" or "own". None: "usual" for a random model, else "own". Raises
    PenstockError."""
    # No prompt is found in the cache, and a step has one token of each sequence: random weights repeat
    # themselves, so that guesses would come true (tests/bench/drafts.py measures guesses).
    config = replace(engine_config(settings), enable_prefix_caching=False)
    check_step(sequences, config)
    if with_drafts:
        check_drafts(config)
    tokenizer = _tokenizer(shape, config)
    folder = _random_folder(settings, shape) if shape else find_folder(settings)
    size = footprint_at(folder, config)
    popularity = _popularity(popularity, shape, size)
    hardware = profile(settings, folder, is_forced=True)
    check_memory(sequences, config, size, hardware)
    started = time.perf_counter()
    with Engine.load(
        folder,
        config,
        tokenizer=tokenizer,
        hardware=hardware,
        is_patient=False,
        cache_folder=settings.cache_dir,
    ) as engine:
        routing = draw_routing(engine, popularity, size, hardware)
        first_token_s = _first_token(engine, started)
        spare_the_collector()  # as a server does
        if routing:
            _fill_slots(engine)
        steps = [_decode(engine, number) for number in sequences]
        if with_prompt:
            steps.append(_prompt(engine))
        drafts = [measure_drafts(engine, number) for number in sequences] if with_drafts else []
        plan = served_plan_of(engine)
        report = BenchReport(
            shape or settings.model, first_token_s, steps, drafts, popularity, routing, plan, hardware,
            _peak_rss_bytes(),
        )  # fmt: skip
    if not is_json:
        print("\n".join(report.lines))
    print(json.dumps(report.data))
    return 0


def _tokenizer(shape: str | None, config: EngineConfig) -> NoText | None:
    """None: the model's own, with which a draft model's vocabulary is compared. Raises ConfigError for random
    weights, which have none."""
    if config.draft_model is None:
        return NoText()
    if shape is not None:
        raise ConfigError(
            "--shape makes weights without a tokenizer, with which a draft model's vocabulary would be "
            "compared: name a model, or leave --draft-model out (penstock plan --shape takes both)"
        )
    return None


def check_step(sequences: tuple[int, ...], config: EngineConfig) -> None:
    """Raises ConfigError for more sequences than a step holds: two steps would be timed in place of one."""
    most = min(config.max_num_seqs, config.max_num_batched_tokens)
    for num_seqs in sequences:
        if not 1 <= num_seqs <= most:
            raise ConfigError(
                f"--sequences {num_seqs}: a step holds 1 to {most} sequences, by --max-num-seqs and "
                "--max-num-batched-tokens"
            )


def check_memory(
    sequences: tuple[int, ...], config: EngineConfig, size: ModelFootprint, hardware: HardwareProfile
) -> None:
    """Raises ConfigError if the sequences don't fit into the plan, and CapacityError if there is no plan."""
    plan = estimated_plan(size, hardware, config)
    context = config.max_model_len or size.max_position_embeddings
    for num_seqs in sequences:
        longest = longest_sequence(config, plan, num_seqs, CONTEXT, NUM_STEPS)
        if longest is None:
            raise ConfigError(
                f"--sequences {num_seqs}: {num_seqs} sequences of more than {CONTEXT} tokens do not fit into "
                f"keys and values of {plan.num_kv_tokens} tokens. Give more (--kv-tokens, --kv-cache-memory)"
            )
        if longest > context:
            raise ConfigError(
                f"--sequences {num_seqs}: the longest comes to {longest} tokens; the context is {context} "
                "tokens (--max-model-len)"
            )


def _popularity(asked: str | None, shape: str | None, size: ModelFootprint) -> str:
    """How tokens choose experts. Raises ConfigError for drawn choices where transformers' routers choose."""
    is_own = size.implementation == "penstock"
    if asked not in (None, "own") and size.experts.count and not is_own:
        raise ConfigError(
            f"--expert-popularity {asked} draws the choices of Penstock's own routers, and this model's "
            "routers are transformers': leave it out, or take --expert-popularity own"
        )
    return asked or ("usual" if shape and is_own else "own")


def _random_folder(settings: Settings, shape: str) -> Path:
    config = find_shape(shape)
    weights, group_size = settings.weights, settings.group_size
    kind = (
        ""
        if (weights, group_size or None) == ("int8", None)
        else f"-{weights}-{group_size or CODE_GROUP_SIZES.get(weights, 64)}"
    )
    folder = settings.cache_dir / "shapes" / (shape.lower() + kind)
    if not (folder / "config.json").is_file():
        print(f"writing random weights of this shape to {folder}", file=sys.stderr)
        bar = ProgressBar(shape, "B")
        try:
            write_random(config, folder, bar, weights, group_size)
        finally:
            bar.close()
    return folder


def _first_token(engine: Engine, started: float) -> float:
    """Seconds from the beginning of loading to the first token of a short prompt."""
    _add(engine, "first", CONTEXT, 0)
    while not engine.step():
        pass
    engine.abort("first")
    return time.perf_counter() - started


def _fill_slots(engine: Engine) -> None:
    """Decode until the slots of experts are full, and hold what was asked for last."""
    _add(engine, "fill", CONTEXT, 1)
    for _ in range(MOST_FILLING_STEPS):
        engine.step()
        if expert_slots_are_full(engine):
            break
    for _ in range(NUM_STEPS):
        engine.step()
    engine.abort("fill")


def _decode(engine: Engine, num_seqs: int) -> Measurement:
    for index in range(num_seqs):
        _add(engine, str(index), CONTEXT, index)
    filling = {str(index) for index in range(num_seqs)}
    while filling:  # a sequence gives its first token when its prompt is computed
        filling -= {output.request_id for output in engine.step()}
    _timed(engine, NUM_STEPS if has_experts(engine) else 0, num_seqs)
    measured = _timed(engine, NUM_EXPERT_STEPS if has_experts(engine) else NUM_STEPS, num_seqs)
    for index in range(num_seqs):
        engine.abort(str(index))
    name = f"decode, {num_seqs} sequence{'s' if num_seqs > 1 else ''}"
    return _measurement(engine, name, measured, num_seqs, num_seqs)


def _prompt(engine: Engine) -> Measurement:
    """The measured step of a prompt of PROMPT tokens, or of fewer if the context or the step has less
    room."""
    length = min(PROMPT, engine.max_model_len - 2, longest_in_a_step(engine))
    samples = []
    for seed in range(2):
        _add(engine, "prompt", length, seed)
        samples += _timed(engine, 1, 1)
        engine.abort("prompt")
    tokens = (1, 1, length) if engine.spec.has_encoder else (length, 1)
    return _measurement(engine, f"prompt of {length}", samples, *tokens)


def _add(engine: Engine, name: str, length: int, seed: int) -> None:
    tokens = random.Random(seed).choices(range(model_of(engine).vocab_size), k=length)
    params = SamplingParams(temperature=0, ignore_eos=True, speculation=False)
    engine.add(GenerationRequest(tokens, params, name))


@dataclass(frozen=True)
class _Sample:
    """One step."""

    seconds: float
    streamed_bytes: float
    stall_s: float
    floor_s: float
    num_experts: float
    num_expert_hits: float


def _timed(engine: Engine, num_steps: int, num_seqs: int) -> list[_Sample]:
    """Times steps. A step computes one token of each sequence."""
    samples = []
    for _ in range(num_steps):
        started = time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - started
        assert len(outputs) == num_seqs, f"{len(outputs)} of {num_seqs} sequences were in a timed step"
        step = snapshot_of(engine).stats.last_step
        assert step is not None
        samples.append(
            _Sample(
                seconds,
                step.streamed_bytes,
                step.stall_s,
                step.floor_s,
                step.num_experts,
                step.num_expert_hits,
            )
        )
    return samples


def _measurement(
    engine: Engine,
    name: str,
    samples: list[_Sample],
    num_tokens: int,
    num_sampled: int,
    num_encoded: int = 0,
) -> Measurement:
    """The median of the samples. With experts, the mean: each step asks for other experts, and the floor is
    that of the experts which were missing."""
    step = predicted_step(engine, num_tokens, num_sampled, num_encoded)
    middle = statistics.mean if has_experts(engine) else statistics.median
    found = _Sample(*(middle(column) for column in zip(*map(astuple, samples), strict=True)))
    rates = (found.num_expert_hits / found.num_experts, step.experts.hit_rate) if found.num_experts else ()
    return Measurement(
        name,
        num_encoded or num_tokens,
        found.seconds,
        step.seconds,
        found.floor_s if found.num_experts else step.floor_s,
        step.binding,
        found.streamed_bytes,
        found.stall_s,
        *rates,
    )


def _peak_rss_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
