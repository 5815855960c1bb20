"""Everything that the server knows of an engine's inside. When the inside changes, this file alone changes.

An engine's methods (load, add, step, abort, close), its tokenizer, its config and its limits are the outside,
which commands use.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from penstock import Engine, EngineConfig, GenerationRequest, SamplingParams, WeightFacts
from penstock.generation.blocks.block_manager import BlockManager
from penstock.generation.blocks.state_pool import StatePool
from penstock.generation.chosen import NOTHING
from penstock.generation.drafting.state_paths import StatePaths
from penstock.generation.scheduling.scheduler import Scheduler
from penstock.generation.sequence import Sequence
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.cost import StepPrediction, predict_step
from penstock.memory.planning.kv_blocks import num_together
from penstock.memory.planning.plan import MemoryPlan
from penstock.memory.planning.popularity import USUAL_EXPONENT, USUAL_OFFSET, usual_weights
from penstock.memory.planning.step_work import StepLoad
from penstock.metrics import STEP_TOKENS
from penstock.model.mixture.drawn_routing import DrawnRouters
from penstock.spec import ModelFootprint
from penstock.unquantized import UnquantizedModel
from penstock.weights import quantization_error
from penstock.weights.quantization_error import QuantizationError
from penstock.weights.tensors import ModelTensors
from penstock_server.facade.expected_drafts import expected_drafts
from penstock_server.facade.model import ServedModel
from penstock_server.facade.snapshot import EngineSnapshot
from penstock_server.protocol.engine_bodies import (
    DraftingBody,
    ExpertsBody,
    HardwareBody,
    HotExpert,
    NodeBody,
    PlanBody,
    ServedPlanBody,
    StatsBody,
    StepBody,
    told,
)

#: Experts that are told of as the most used ones.
NUM_HOT = 8


def model_of(engine: Engine) -> ServedModel:
    return ServedModel(
        engine.tokenizer,
        engine.spec.vocab_size,
        engine.max_model_len,
        engine.default_sampling,
        engine.grammars.check,
        engine.forms,
        predicts_prompt=not (engine.spec.has_encoder or engine.spec.sees_prompt_both_ways),
        num_start_tokens=len(engine.spec.decoder_start),
        architecture=engine.spec.architecture,
        hidden_size=engine.spec.hidden_size,
        model_impl=engine.spec.implementation,
        is_batch_invariant=engine.model.is_invariant,
        pooling=engine.pooling,
    )


def weights_of(engine: Engine) -> WeightFacts:
    """What they are. Of several machines, none knows all parameters."""
    facts = engine.model.store.facts
    return replace(facts, num_parameters=0) if engine.nodes else facts


def snapshot_of(engine: Engine) -> EngineSnapshot:
    stats = StatsBody(
        **vars(copy.deepcopy(engine.metrics)),
        time_s=time.monotonic(),
        current_layer=engine.streamer.current_layer,
        experts=_experts_body(engine),
        nodes=_nodes(engine),
    )
    config = engine.config
    return EngineSnapshot(stats, STEP_TOKENS, config.block_size, config.kv_dtype, engine.max_model_len)


def _experts_body(engine: Engine) -> ExpertsBody | None:
    tier, layers = engine.streamer.tiers.nearest_experts, engine.streamer.layer_places
    if tier is None:
        return None
    in_slots, arrived = [0] * len(layers), [0] * len(layers)
    number = [tier.num_units[place] for place in layers]
    for stack, layer, _, _ in tier.policy.keys:
        in_slots[layers[stack, layer]] += 1
    for place, count in tier.num_arrived.copy().items():
        arrived[layers[place]] = count
    hot = [
        HotExpert(layer=layers[key[:2]], expert=key.expert or 0, share=share)
        for key, share in tier.uses.hottest(NUM_HOT)
    ]
    return ExpertsBody(
        num_slots=tier.num_slots,
        num_pinned=tier.policy.num_pinned,
        num_experts=number,
        in_slots=in_slots,
        num_arrived=arrived,
        hot=hot,
    )


def served_plan_of(engine: Engine) -> ServedPlanBody:
    step = step_body(predicted_step(engine, 1, 1))
    model, drafter = engine.model, engine.draft_model
    return ServedPlanBody(
        **dict(plan_body(engine.plan)),
        step=step,
        draft_model_bytes=0 if drafter is None else drafter.num_bytes,
        draft_model_device_bytes=0 if drafter is None else drafter.num_card_bytes,
        drafting=_drafting(engine),
        nodes=_nodes(engine),
        model_impl=model.spec.implementation,
        is_batch_invariant=model.is_invariant,
    )


def _nodes(engine: Engine) -> tuple[NodeBody, ...]:
    return tuple(NodeBody.model_validate(each) for each in engine.nodes)


def missing_machines(engine: Engine) -> str:
    """The machines that can't compute now; "" if all can."""
    missing = [node for node in engine.nodes if node.state != "ready"]
    return ", ".join(f"rank {node.rank} is {node.state}" for node in missing)


def _drafting(engine: Engine) -> tuple[DraftingBody, ...]:
    """What drafts should bring."""
    models = [] if engine.draft_model is None else [engine.draft_model.assumed]
    most = num_together(engine.plan, engine.max_model_len, engine.config)
    paths = StatePaths.of(engine.plan, engine.meter.predict)
    return expected_drafts(engine.meter.known_s, engine.config, most, models, paths)


def predicted_step(engine: Engine, num_tokens: int, num_sampled: int, num_encoded: int = 0) -> StepPrediction:
    """The plan's prediction for a step of `num_tokens` tokens that samples after `num_sampled` of them, and
    that encodes prompts of `num_encoded` tokens together."""
    return engine.meter.predict(StepLoad(num_tokens, num_sampled, num_encoded))


def plan_body(plan: MemoryPlan) -> PlanBody:
    return PlanBody(**told(PlanBody, plan))


def step_body(step: StepPrediction) -> StepBody:
    return StepBody.model_validate(step)


def hardware_body(hardware: HardwareProfile) -> HardwareBody:
    return HardwareBody.model_validate(hardware)


def has_experts(engine: Engine) -> bool:
    return engine.streamer.tiers.nearest_experts is not None


def expert_slots_are_full(engine: Engine) -> bool:
    """Whether the next expert that is read takes the place of another."""
    tier = engine.streamer.tiers.nearest_experts
    return tier is None or not tier.arrivals.free_slots


def draw_routing(
    engine: Engine, popularity: str, size: ModelFootprint, hardware: HardwareProfile
) -> str | None:
    """Have routers choose by chance, by the "usual" popularity of experts or by a "uniform" one, and have the
    plan predict so. Returns the popularity in words; None if the routers go on to choose themselves ("own",
    or there are none)."""
    tier, number = engine.streamer.tiers.nearest_experts, size.experts.per_layer
    if tier is None or popularity == "own":
        return None
    weights = usual_weights(number) if popularity == "usual" else (1.0,) * number
    family = engine.model.executor.family
    family.kernels = DrawnRouters(family.kernels, weights)
    size = replace(size, experts=replace(size.experts, weights=weights))
    engine.meter.predict = partial(predict_step, engine.plan, size, hardware, engine.config)
    tier.uses.clear()  # those of another popularity
    usual = f"the expert of rank r has the weight (r + {USUAL_OFFSET}) ** -{USUAL_EXPONENT}"
    return usual if popularity == "usual" else "all experts alike"


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
    states = StatePool(plan.num_state_slots, plan.num_state_sequences)
    blocks = BlockManager(plan.num_kv_blocks, plan.block_size, config.enable_prefix_caching, states)
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
