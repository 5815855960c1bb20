"""Which unit is read next, and which unit gives its place up: pure functions of keys and numbers.

A sweep meets dense units in a cycle, so the next units are known (`next_in_cycle`, `last_in_cycle`). Tokens
ask for experts, and only the past uses of the experts are known (`victim`)."""

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
    """The unit to read; None if there is none. Candidates are units that are neither there nor on their way
    (`taken`) and that have a place: a `resident` unit has its own, any other unit needs a free slot. The
    candidate that the sweep meets first is read. The unit at which the sweep stands is read in any case,
    other units only if `can_read_ahead`."""
    for ahead in range(len(cycle) if can_read_ahead else 1):
        key = cycle[(position + ahead) % len(cycle)]
        if key not in taken and (has_slot or key in resident):
            return key
    return None


def last_in_cycle(cycle: Sequence[Key], position: int, staged: Container[Key]) -> Key | None:
    """The unit that gives its slot up when all slots hold units of a sweep that ended early: the unit of
    `staged` that the sweep meets last. None if no unit of `staged` is in the cycle."""
    for ahead in reversed(range(len(cycle))):
        key = cycle[(position + ahead) % len(cycle)]
        if key in staged:
            return key
    return None


def victim(last_uses: Mapping[Key, int], num_slots: int, num_per_sweep: int) -> Key | None:
    """The unit that gives its slot up, of those that nobody uses now; None if there is none. `last_uses` has
    the number of each unit's last use, which rises from use to use.

    If the slots hold what one sweep of one token asks for, the least recently used unit goes. With fewer
    slots a sweep would throw out each unit before its next use; then the most recently used unit goes, and
    the others stay for the next sweep.
    """
    choose = min if num_slots >= num_per_sweep else max
    return choose(last_uses, key=lambda key: last_uses[key], default=None)
