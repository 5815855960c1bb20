"""Which unit is read next, and which gives its place up: pure functions of keys and numbers.

A sweep meets dense units in a cycle, so that what comes next is known (`next_in_cycle`, `last_in_cycle`).
Experts are asked for by tokens, and what was used is all that is known (`victim`)."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key")


def next_in_cycle(
    cycle: Sequence[Key],
    position: int,
    taken: Container[Key],
    resident: Container[Key],
    has_slot: bool,
    can_read_ahead: bool,
) -> Key | None:
    """What to read: of the units that are not there nor on their way (`taken`), the one that the sweep meets
    first and that has a place, which is its own if it is `resident`, and otherwise a free slot. What the
    sweep stands at is read in any case, the others if `can_read_ahead`. None: nothing."""
    for ahead in range(len(cycle) if can_read_ahead else 1):
        key = cycle[(position + ahead) % len(cycle)]
        if key not in taken and (has_slot or key in resident):
            return key
    return None


def last_in_cycle(cycle: Sequence[Key], position: int, staged: Container[Key]) -> Key | None:
    """What gives its slot up when all hold what a sweep that ended early left: the one met last. None: none
    of `staged` is in the cycle."""
    for ahead in reversed(range(len(cycle))):
        key = cycle[(position + ahead) % len(cycle)]
        if key in staged:
            return key
    return None


def victim(last_uses: Mapping[Key, int], num_slots: int, num_per_sweep: int) -> Key | None:
    """Which of the units that nobody uses now gives its slot up; `last_uses` counts uses, ever rising.

    The least recently used one, if the slots hold what one sweep of one token asks for. With fewer slots a
    sweep would throw out each unit before its next use, so the most recently used one goes and the others
    stay for the next sweep. None: there is none.
    """
    choose = min if num_slots >= num_per_sweep else max
    return choose(last_uses, key=lambda key: last_uses[key], default=None)
