"""When a card and the processor can share products, and what the card keeps. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from penstock.config import EngineConfig
from penstock.errors import CapacityError
from penstock.memory.pages import round_up
from penstock.memory.planning.cost import Predictor
from penstock.memory.planning.plan import MemoryPlan
from penstock.memory.planning.product_split import SHARE_STEPS, part_rows
from penstock.memory.planning.split_cost import split_work
from penstock.spec import ModelFootprint

#: Plans a model with so many bytes of activations beyond those that it has on one lane. Raises CapacityError.
MakePlan = Callable[[ModelFootprint, int], MemoryPlan]


def may_share_products(plan: MemoryPlan, predictor: Predictor) -> bool:
    """Whether there is a card, layers that don't stay in its memory, and a model whose products can be
    shared."""
    footprint, hardware, config = predictor
    is_streamed = plan.has_gpu and plan.streamed_bytes > 0
    has_rates = bool(hardware.memory_read_gbps and hardware.int8_gops and hardware.lane.link_gbps)
    return is_streamed and has_rates and bool(footprint.matrices) and config.share_products == "auto"


def keeps_upper(footprint: ModelFootprint, config: EngineConfig) -> bool:
    """Whether a card that shares products keeps all upper planes: they guess."""
    return config.draft_with_planes and bool(footprint.lower_planes)


def kept_shares(plan: MemoryPlan, footprint: ModelFootprint, config: EngineConfig) -> Iterator[float]:
    """Shares of each matrix that a card may keep, the largest first. `plan` is the plan without sharing,
    whose resident layers take about as many bytes."""
    if config.num_resident_layers is not None:
        share = config.num_resident_layers / (footprint.num_layers - footprint.num_encoder_layers)
        if keeps_upper(footprint, config):  # as many planes stay as so many layers have, upper ones first
            share = 2 * share - 1
        if share >= 0:
            yield min(1.0, share)
        return
    staging = plan.num_staging_slots * plan.staging_slot_bytes
    most = int(SHARE_STEPS * (plan.layer_bytes("device") + staging) / footprint.decoder_bytes)
    yield from (step / SHARE_STEPS for step in range(min(most, SHARE_STEPS - 1), -1, -1))


def split_footprint(footprint: ModelFootprint, share: float, keeps_upper: bool = False) -> ModelFootprint:
    """The footprint of the model whose layers are two units each, as split_rows() (weights/split) makes
    it."""
    num_whole = footprint.num_encoder_layers
    units, layers = list(footprint.layer_bytes[:num_whole]), list[int]()
    for index, size in enumerate(footprint.layer_bytes[num_whole:], num_whole):
        if index in footprint.lower_planes:
            layers[-1] += size
        else:
            layers.append(size)
    for size, matrices in zip(layers, footprint.matrices[num_whole:], strict=True):
        rests = [each.out_features - part_rows(each.out_features, share) for each in matrices]
        rest = sum(num_rows * each.row_bytes for num_rows, each in zip(rests, matrices, strict=True))
        kept = size - rest
        if keeps_upper:
            kept += sum(
                num_rows * (each.row_bytes - each.lower_bytes)
                for num_rows, each in zip(rests, matrices, strict=True)
                if each.lower_bytes
            )
        units += (kept, rest)
    places = frozenset(range(num_whole + 1, len(units), 2))
    return replace(footprint, layer_bytes=tuple(units), lower_planes=places, is_split=True)


def split_plan(
    alone: MemoryPlan, predictor: Predictor, activation_bytes: int, make_plan: MakePlan
) -> MemoryPlan | None:
    """The plan in which the card keeps as large a share of each matrix as fits, with `activation_bytes` more
    of activations than in the plan in which it is `alone`. None if the rest does not fit into RAM."""
    footprint, _, config = predictor
    has_upper = keeps_upper(footprint, config)
    # A product has two results for a moment: its parts, and the parts together.
    activation_bytes += 4 * config.max_num_batched_tokens * footprint.widest_layer
    for share in kept_shares(alone, footprint, config):
        try:
            found = make_plan(split_footprint(footprint, share, has_upper), activation_bytes)
        except CapacityError:
            continue
        if len(found.resident) * 2 != len(found.step_layers):
            continue
        if found.at_home("disk"):
            return None  # a smaller share leaves more to RAM
        return replace(found, kept_share=share, keeps_upper=has_upper)
    return None


def product_note(shared: MemoryPlan, alone: MemoryPlan, predictor: Predictor) -> str:
    """What shared products bring, for people."""
    before, after = (predictor.decode(plan, 1) for plan in (alone, shared))
    footprint = predictor.footprint
    texts, sharing_s = [], 0.0
    for num_tokens in (1, 32):
        work = split_work(shared, *predictor, num_tokens)
        if work is not None:
            sharing_s = max(sharing_s, work.step.sharing_s if work.share < 1 else 0.0)
            texts.append(
                f"with {num_tokens} token{'s' if num_tokens > 1 else ''} in a step the processor computes "
                f"{work.processor_share:.0%} of the layers"
            )
    kept = round_up(shared.layer_bytes("device")) / footprint.decoder_bytes
    beside = ", without experts" if footprint.experts.count else ""
    beside += ", but for the encoder's" if footprint.num_encoder_layers else ""
    beside += ", all upper planes among it" if shared.keeps_upper else ""
    return (
        f"the card and the processor share each product: the card keeps {kept:.0%} of each layer{beside}, "
        f"and {'; '.join(texts)}. A step of one token should take {after.seconds:.2g} s instead of "
        f"{before.seconds:.2g} s, and hand-overs and launches have {1e3 * sharing_s:.2g} ms of it "
        "(--share-products off decides otherwise)"
    )
