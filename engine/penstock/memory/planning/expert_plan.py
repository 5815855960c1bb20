"""Whether a card and the processor can compute a mixture's experts together. Pure."""

from __future__ import annotations

from penstock.memory.planning.cost import Predictor
from penstock.memory.planning.expert_lanes import MOST_TOKENS, expert_rates
from penstock.memory.planning.plan import MemoryPlan
from penstock.spec import ModelFootprint

#: Tokens of the steps of a mixture that are compared.
STEP_SIZES = (1, 8, 32)


def can_share(predictor: Predictor) -> bool:
    """Whether there are experts, a card and rates, and nobody has decided otherwise."""
    footprint, hardware, config = predictor
    is_ours = footprint.implementation == "penstock" and config.share_products == "auto"
    return is_ours and expert_rates(footprint.experts, hardware, 1) is not None


def lacks_experts(plan: MemoryPlan, footprint: ModelFootprint) -> bool:
    """Whether RAM has experts that the card's memory lacks."""
    return plan.has_gpu and 0 < plan.num_expert_slots < min(
        footprint.experts.count, plan.num_host_expert_slots
    )


def activation_bytes(footprint: ModelFootprint) -> int:
    """What the card holds of activations of experts in RAM: their inputs and results, and what lies between
    their products, [MOST_TOKENS, gate and up] and half of it."""
    return 4 * MOST_TOKENS * (2 * footprint.hidden_size + footprint.widest_layer * 3 // 2)


def expert_note(shared: MemoryPlan, alone: MemoryPlan, predictor: Predictor) -> str:
    """What experts on two lanes bring, for people. In the plan `alone` the card computes all experts."""
    texts = []
    for num_tokens in STEP_SIZES:
        before, after = (predictor.decode(plan, num_tokens) for plan in (alone, shared))
        there, asked = after.experts, after.experts.num_asked
        texts.append(
            f"in a step of {num_tokens} token{'s' if num_tokens > 1 else ''} it computes "
            f"{there.num_in_ram / asked:.0%} of the experts, {there.num_missing / asked:.0%} move to the "
            f"card, and the step should take {after.seconds:.2g} s instead of {before.seconds:.2g} s"
        )
    return (
        f"the processor computes experts that lie in RAM, at once with the card: {'; '.join(texts)} "
        "(--share-products off decides otherwise)"
    )
