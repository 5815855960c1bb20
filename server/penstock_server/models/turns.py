"""Which models make room for another one, and how much memory that one gets: decisions on plain numbers,
without a clock and without an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Held:
    """A loaded model."""

    name: str
    used_bytes: int
    #: Requests are answered by it now.
    is_busy: bool = False
    #: It never makes room for others.
    is_pinned: bool = False
    #: When a request was last given the model; seconds of any clock.
    last_used: float = 0.0


def leavers(needed: int, budget: int, held: Sequence[Held]) -> list[str]:
    """The models that have to go before `needed` bytes of the budget are free. Models at rest go before busy
    ones, and those that were used longest ago first. If the budget is too small even without them, all that
    are not pinned go: the new model streams its layers, and each byte more spares it a read."""
    free = budget - sum(model.used_bytes for model in held)
    gone = []
    for model in sorted(held, key=lambda model: (model.is_busy, model.last_used)):
        if free >= needed:
            break
        if not model.is_pinned:
            gone.append(model.name)
            free += model.used_bytes
    return gone


def allotment(needed: int, free: int, others: Iterable[int]) -> int:
    """The bytes that a model may take of `free` ones. What it does not need is kept for the models that are
    not loaded (`others`, what each needs), the smallest first, as far as they fit beside it; keys and values
    would take all of it otherwise."""
    for other in sorted(others):
        if free - other < needed:
            break
        free -= other
    return free
