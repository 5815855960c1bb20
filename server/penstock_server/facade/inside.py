"""Everything that the server knows of an engine's inside. When the inside changes, this file alone changes.

An engine's methods (load, add, step, abort, close), its tokenizer, its config and its limits are the outside,
which commands use.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from penstock import Engine, EngineConfig, GenerationRequest, SamplingParams
from penstock.generation.chosen import NOTHING
from penstock.generation.scheduling.block_manager import BlockManager
from penstock.generation.scheduling.scheduler import Scheduler
from penstock.generation.sequence import Sequence
from penstock.memory.cost import StepPrediction
from penstock.memory.hardware import HardwareProfile
from penstock.memory.plan import MemoryPlan
from penstock.metrics import STEP_TOKENS
from penstock.unquantized import UnquantizedModel
from penstock.weights import quantization_error
from penstock.weights.quantization_error import QuantizationError
from penstock.weights.tensors import ModelTensors
from penstock_server.facade.model import ServedModel
from penstock_server.facade.snapshot import EngineSnapshot
from penstock_server.protocol.engine_bodies import (
    HardwareBody,
    PlanBody,
    ServedPlanBody,
    StatsBody,
    StepBody,
    told,
)


def model_of(engine: Engine) -> ServedModel:
    return ServedModel(
        engine.tokenizer,
        engine.spec.vocab_size,
        engine.max_model_len,
        engine.default_sampling,
        engine.grammars.check,
        engine.forms,
        not (engine.spec.has_encoder or engine.spec.sees_prompt_both_ways),
        len(engine.spec.decoder_start),
    )


def snapshot_of(engine: Engine) -> EngineSnapshot:
    now = {"time_s": time.monotonic(), "current_layer": engine.streamer.current_layer}
    stats = StatsBody(**told(StatsBody, engine.metrics, **now))
    config = engine.config
    return EngineSnapshot(stats, STEP_TOKENS, config.block_size, config.kv_dtype, engine.max_model_len)


def served_plan_of(engine: Engine) -> ServedPlanBody:
    step = step_body(predicted_step(engine, 1, 1))
    return ServedPlanBody(**dict(plan_body(engine.plan)), step=step)


def predicted_step(engine: Engine, num_tokens: int, num_sampled: int, num_encoded: int = 0) -> StepPrediction:
    """The plan's prediction for a step of `num_tokens` tokens that samples after `num_sampled` of them, and
    that encodes prompts of `num_encoded` tokens together."""
    return engine.meter.predict(num_tokens, num_sampled, num_encoded)


def plan_body(plan: MemoryPlan) -> PlanBody:
    return PlanBody(**told(PlanBody, plan))


def step_body(step: StepPrediction) -> StepBody:
    return StepBody.model_validate(step)


def hardware_body(hardware: HardwareProfile) -> HardwareBody:
    return HardwareBody.model_validate(hardware)


def tensors_of(engine: Engine) -> ModelTensors:
    """The tensors of the engine's model, layer by layer."""
    return engine.model.store.tensors


def quantization_errors(engine: Engine, reference: UnquantizedModel) -> Iterator[QuantizationError]:
    """The error of each of the engine's matrices against the reference's matrix."""
    return quantization_error.quantization_errors(engine.model.store, reference.store)


def longest_in_a_step(engine: Engine) -> int:
    """Tokens of the longest prompt that one step computes whole."""
    return engine.config.max_num_batched_tokens - len(engine.spec.soft_prompt)


def longest_sequence(
    config: EngineConfig, plan: MemoryPlan, num_seqs: int, num_prompt_tokens: int, num_steps: int
) -> int | None:
    """Tokens of the longest of `num_seqs` sequences, `num_steps` steps after all prompts were computed; None
    if the KV cache has no room for all of them until then. The scheduler runs here without a model."""
    blocks = BlockManager(plan.num_kv_blocks, plan.block_size, config.enable_prefix_caching)
    scheduler = Scheduler(blocks, config.max_num_seqs, config.max_num_batched_tokens)
    for index in range(num_seqs):
        request = GenerationRequest([0] * num_prompt_tokens, SamplingParams())
        scheduler.add(Sequence(index, request, num_prompt_tokens + num_steps))
    num_timed = 0
    while num_timed < num_steps:
        num_timed += all(sequence.num_pending_tokens <= 1 for sequence in scheduler)
        batch = scheduler.schedule()
        if not batch or scheduler.admission.num_preemptions:
            return None
        for sequence, _ in scheduler.update(batch, [NOTHING] * len(batch.scheduled)):
            sequence.append(0)
    return max(sequence.num_tokens for sequence in scheduler)
