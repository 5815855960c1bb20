"""Loads a model and its drafter: a draft model, or a head."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

from penstock.config import EngineConfig
from penstock.drafters.find_head import find_head
from penstock.errors import CapacityError, ConfigError
from penstock.loader import LoadedModel, ModelSource, Share, load_model
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.plan import MemoryPlan, gib

if TYPE_CHECKING:
    from penstock.drafters.draft_model import DraftModel
    from penstock.drafters.mtp_drafter import MTPDrafter


def load_with_guesses(
    source: ModelSource,
    config: EngineConfig,
    hardware: HardwareProfile | None,
    share: Share | None,
    undo: ExitStack,
) -> tuple[LoadedModel, DraftModel | MTPDrafter | None]:
    """The model, and the small model or the head that guesses for it, which takes its memory first. `share`
    leaves layers to other machines. `undo` closes what is there, if the rest can't be loaded. Raises what
    load_model() raises."""
    small: DraftModel | None = None
    head = find_head(source.model, config, source.offline, source.revision, hardware)
    if head is not None:
        undo.callback(head.close)
        config, hardware = head.leave(config, hardware)
        if share is not None:
            raise ConfigError("a head that guesses is not for a model on several machines so far")
    elif config.draft_model is not None:
        from penstock.drafters.draft_model import DraftModel

        small = DraftModel.load(config.draft_model, config, source.offline, hardware)
        undo.callback(small.close)
        config, hardware = small.leave(config, hardware)
    guessing = head or small
    with contextlib.nullcontext() if guessing is None else _told_of_memory(guessing.plan):
        loaded = load_model(source, config, hardware, share)
    undo.callback(loaded.model.close)
    if head is not None:
        begun = head.begin(loaded.model)
        undo.callback(begun.close)
        return loaded, begun
    if small is not None:
        small.share_vocabulary(loaded.model.tokenizer, loaded.model.spec.vocab_size)
    return loaded, small


@contextlib.contextmanager
def _told_of_memory(plan: MemoryPlan) -> Iterator[None]:
    """Says in a CapacityError how much of the memory that is too small belongs to the drafter, by its
    plan."""
    from penstock.drafters.memory_beside import card_bytes

    try:
        yield
    except CapacityError as error:
        if error.memory == "device" and card_bytes(plan):
            taken = f"{gib(card_bytes(plan))} of GPU memory: compute a draft model with --draft-device cpu"
        elif error.memory == "host" and plan.host_used_bytes:
            taken = f"{gib(plan.host_used_bytes)} of RAM: leave --draft-model out"
        else:
            raise
        raise CapacityError(
            f"{error}. The drafter takes {taken}, or switch the model's own head off (--mtp off)",
            error.memory,
        ) from error
