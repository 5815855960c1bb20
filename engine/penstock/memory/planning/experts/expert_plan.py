"""Whether a card and the processor compute a mixture's experts together. Pure."""

from __future__ import annotations

from dataclasses import replace

from penstock.config import EngineConfig
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.cost import predict_step
from penstock.memory.planning.experts.expert_lanes import MOST_TOKENS, expert_rates
from penstock.memory.planning.plan import HANDOVER_BYTES, MemoryPlan
from penstock.memory.planning.shared_plan import LEAST_GAIN
from penstock.spec import ModelFootprint

#: Tokens of the steps that are compared. Experts are shared if one of these steps gains.
STEP_SIZES = (1, 8, 32)


def may_share_experts(
    plan: MemoryPlan, footprint: ModelFootprint, hardware: HardwareProfile, config: EngineConfig
) -> bool:
    """Whether there is a card, and in RAM there are experts that its memory lacks."""
    lacks_experts = plan.has_gpu and 0 < plan.num_expert_slots < min(
        footprint.experts.count, plan.num_host_expert_slots
    )
    is_ours = footprint.implementation == "penstock" and config.share_products == "auto"
    return lacks_experts and is_ours and expert_rates(footprint.experts, hardware, 1) is not None


def activation_bytes(footprint: ModelFootprint) -> int:
    """What the card holds of activations of experts in RAM: their inputs and results, and what lies between
    their products, [MOST_TOKENS, gate and up] and half of it."""
    return 4 * MOST_TOKENS * (2 * footprint.hidden_size + footprint.widest_layer * 3 // 2)


def shared_if_faster(
    found: MemoryPlan,
    alone: MemoryPlan,
    footprint: ModelFootprint,
    hardware: HardwareProfile,
    config: EngineConfig,
) -> MemoryPlan | None:
    """The plan `found`, with experts on two lanes, and what it brings, for people. None if it brings too
    little. In the plan `alone` the card computes all experts."""
    shared = replace(found, shares_experts=True)
    if (beyond := shared.host_used_bytes - shared.host_budget_bytes) > 0:
        num_fewer = -(-min(beyond, HANDOVER_BYTES) // shared.expert_slot_bytes)
        shared = replace(shared, num_host_expert_slots=shared.num_host_expert_slots - num_fewer)
    if shared.num_host_expert_slots <= shared.num_expert_slots:
        return None
    texts, is_faster = [], False
    for num_tokens in STEP_SIZES:
        before, after = (
            predict_step(plan, footprint, hardware, config, num_tokens, num_tokens)
            for plan in (alone, shared)
        )
        there, asked = after.experts, after.experts.num_asked
        is_faster |= after.seconds <= (1 - LEAST_GAIN) * before.seconds and there.num_in_ram > 0
        texts.append(
            f"in a step of {num_tokens} token{'s' if num_tokens > 1 else ''} it computes "
            f"{there.num_in_ram / asked:.0%} of the experts, {there.num_missing / asked:.0%} move to the "
            f"card, and the step should take {after.seconds:.2g} s instead of {before.seconds:.2g} s"
        )
    if not is_faster:
        return None
    note = (
        f"the processor computes experts that lie in RAM, at once with the card: {'; '.join(texts)} "
        "(--share-products off decides otherwise)"
    )
    return replace(shared, notes=(*shared.notes, note))
