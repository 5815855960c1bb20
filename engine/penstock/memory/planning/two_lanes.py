"""The plan in which a card and the processor compute together, where this is faster. Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from penstock.errors import CapacityError
from penstock.memory.planning import expert_plan
from penstock.memory.planning import plan as plans
from penstock.memory.planning.cost import Predictor
from penstock.memory.planning.plan import MemoryPlan
from penstock.memory.planning.shared_plan import MakePlan, may_share_products, product_note, split_plan
from penstock.memory.planning.splits_in_ram import SPLIT_KEYS, AttendsInRam, SpilledKeys
from penstock.memory.planning.step_work import StepLoad

#: What has to be saved of a step, and what another step may lose: predictions are not more exact.
LEAST_GAIN = 0.05
#: Whether products are shared, and whether experts are; simple plans come first.
KINDS = ((False, True), (True, False), (True, True))


def with_processor(alone: MemoryPlan, predictor: Predictor, make_plan: MakePlan) -> MemoryPlan:
    """The plan in which the lane is `alone`, or a faster one, in which a card and the processor share the
    products of dense layers, experts, or both; with notes for people."""
    best = alone
    for kind in KINDS:
        found = _shared(kind, alone, predictor, make_plan)
        if found is not None and _is_faster(found, best, predictor):
            best = found
    notes = best.notes
    if best.kept_share is not None:
        notes += (product_note(best, alone, predictor),)
    if best.shares_experts:
        notes += (expert_plan.expert_note(best, alone, predictor),)
    best = replace(best, notes=notes)
    if best.attends_in_ram is None:
        return best
    return _attending(best, best.attends_in_ram, least_splits(best, predictor))


def _attending(plan: MemoryPlan, attends: AttendsInRam, least: int) -> MemoryPlan:
    """The plan in which the processor attends from `least` splits in RAM on. Where no step has so many, it
    never attends."""
    if least > plan.num_spilled_tokens // SPLIT_KEYS:
        return replace(plan, attends_in_ram=None)
    note = (
        f"the processor attends to {attends.share:.0%} of the keys and values in RAM where this is faster: "
        f"in steps of few tokens, whose sequences have at least {least * SPLIT_KEYS} tokens there"
    )
    return replace(plan, notes=(*plan.notes, note), attends_in_ram=attends._replace(least_splits=least))


def least_splits(plan: MemoryPlan, predictor: Predictor) -> int:
    """How many splits in RAM a step of one token has at least if it is faster with the processor's part of
    them than with the link alone; one more than there are, if no step is."""

    def step_s(num_splits: int, attends: AttendsInRam | None) -> float:
        num_tokens = num_splits * SPLIT_KEYS
        token_bytes = predictor.footprint.kv_bytes_per_token
        keys = SpilledKeys.of_one(num_tokens, num_tokens, token_bytes, attends)
        return predictor.step(plan, StepLoad(1, 1, 0, None, *keys.parts(1))).seconds

    def gains(num_splits: int) -> bool:
        attending_s = step_s(num_splits, plan.attends_in_ram)
        return attending_s <= (1 - LEAST_GAIN) * step_s(num_splits, None)

    numbers = range(1, plan.num_spilled_tokens // SPLIT_KEYS + 1)
    return 1 + bisect_left(numbers, True, key=gains)


def _shared(
    kind: tuple[bool, bool], alone: MemoryPlan, predictor: Predictor, make_plan: MakePlan
) -> MemoryPlan | None:
    """The plan that shares products, experts, or both; None if there is none."""
    (shares_products, shares_experts), footprint = kind, predictor.footprint
    if shares_products and not may_share_products(alone, predictor):
        return None
    if shares_experts and not expert_plan.can_share(predictor):
        return None
    more_bytes = expert_plan.activation_bytes(footprint) if shares_experts else 0
    found: MemoryPlan | None = None
    try:
        if shares_products:
            found = split_plan(alone, predictor, more_bytes, make_plan)
        elif expert_plan.lacks_experts(alone, footprint):
            found = make_plan(footprint, more_bytes)
    except CapacityError:
        return None
    if found is None or (shares_experts and not expert_plan.lacks_experts(found, footprint)):
        return None
    found = _with_handover(replace(found, shares_experts=shares_experts))
    if shares_experts and found.num_host_expert_slots <= found.num_expert_slots:
        return None
    return found


def _with_handover(plan: MemoryPlan) -> MemoryPlan:
    """In RAM, the handover takes the place of some experts, if there is no other place."""
    beyond = min(plan.host_used_bytes - plan.host_budget_bytes, plans.HANDOVER_BYTES)
    if beyond <= 0 or not plan.num_host_expert_slots:
        return plan
    num_fewer = -(-beyond // plan.expert_slot_bytes)
    return replace(plan, num_host_expert_slots=max(1, plan.num_host_expert_slots - num_fewer))


def _is_faster(found: MemoryPlan, before: MemoryPlan, predictor: Predictor) -> bool:
    """Whether a step gains in which the processor has a share, and no step loses."""
    gains = False
    for num_tokens in expert_plan.STEP_SIZES if predictor.footprint.experts.count else (1,):
        was, now = (predictor.decode(plan, num_tokens) for plan in (before, found))
        if now.seconds > (1 + LEAST_GAIN) * was.seconds:
            return False
        gains |= now.seconds <= (1 - LEAST_GAIN) * was.seconds and now.processor_share > 0
    return gains
