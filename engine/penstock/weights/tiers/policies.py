"""Which dense unit is read next, and which one gives its place up: pure functions of keys and numbers. Sweeps
meet dense units in a cycle, so the next units are known. expert_policy.py decides about experts.

An encoder's units come first in the order, and are not in the cycle (`num_once` units): after the encoder, a
sweep goes on to the decoder, and after the decoder comes the decoder of the next step."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key")


def next_in_cycle(
    cycle: Sequence[Key],
    position: int,
    taken: Container[Key],
    resident: Container[Key],
    has_slot: bool,
    can_read_ahead: bool,
    num_once: int = 0,
) -> Key | None:
    """The unit to read; None if there is none. Candidates are units that are neither there nor on their way
    (`taken`) and that have a place: a `resident` unit has its own, any other unit needs a free slot. The
    candidate that the sweep meets first is read. The unit at which the sweep stands is read in any case,
    other units only if `can_read_ahead`. Units that the sweep has passed and that are not in the cycle are
    read last, and only if they are resident."""
    if not can_read_ahead:
        key = cycle[position]
        return key if key not in taken and (has_slot or key in resident) else None
    for key in _upcoming(cycle, position, num_once):
        if key not in taken and (has_slot or key in resident):
            return key
    passed = cycle[: min(position, num_once)]
    return next((key for key in passed if key in resident and key not in taken), None)


def met_last(keys: Iterable[Key], indexes: Mapping[Key, int], position: int, num_once: int = 0) -> Key:
    """Of some units, the one that sweeps meet last. `indexes` has the place of each unit in the order. A unit
    that sweeps never meet comes after all others."""

    def num_ahead(key: Key) -> int:
        index = indexes[key]
        if index >= position:
            return index - position
        return len(indexes) - position + (index - num_once if index >= num_once else len(indexes) + index)

    return max(keys, key=num_ahead)


def _upcoming(cycle: Sequence[Key], position: int, num_once: int) -> Iterator[Key]:
    """The units that sweeps meet from `position` on, each once."""
    yield from cycle[position:]
    yield from cycle[num_once:position]
