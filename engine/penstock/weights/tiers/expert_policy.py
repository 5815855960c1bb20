"""ExpertPolicy: which expert gives its slot up. Pure: the policy knows keys, counts and the order of uses,
and neither buffers nor reads.

With room for about two sweeps of one token, the least recently used expert goes: all policies that were
published come within a few hits of this one. With fewer slots, most experts would be thrown out before their
next use, and below one sweep each of them would. Then the experts with the most uses are *pinned*: they stay,
and the others pass through the few slots that are left. A step of many tokens can ask for more experts than
there are slots; it counts as such a sweep, and leaves the pinned ones to the steps after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from penstock.memory.planning.popularity import PINNED_BELOW_SWEEPS
from penstock.weights.tiers.use_counts import UseCounts

Key = TypeVar("Key")

#: Slots through which experts pass that are not pinned: as many as are read and computed at the same time,
#: and at most this share of all.
NUM_PASSING, PASSING_SHARE = 16, 8
#: The pinned experts are chosen anew after so many sweeps of one token.
SWEEPS_PER_CHOICE = 8


class ExpertPolicy(Generic[Key]):
    """The experts in the slots, by their last uses."""

    def __init__(self, num_slots: int, uses: UseCounts[Key], pins: bool = False) -> None:
        """The caller counts the `uses`. `pins`: experts are pinned, however many slots there are."""
        self._num_slots = num_slots
        self._pins_always = pins
        self._num_per_sweep = uses.num_per_sweep
        self._uses = uses
        self._num_pins = num_slots - min(NUM_PASSING, max(1, num_slots // PASSING_SHARE))
        #: All experts in slots, and those that are not pinned; the least recently used comes first. One and
        #: the same as long as none is pinned.
        self._order: dict[Key, None] = {}
        self._passing = self._order
        self._pins: set[Key] = set()
        self._next_choice = 0

    @property
    def num_pinned(self) -> int:
        """Experts in slots that stay whatever other experts are asked for."""
        return len(self._order) - len(self._passing)

    @property
    def keys(self) -> list[Key]:
        """The experts in slots. Any thread may ask."""
        return list(self._order)

    def pinned(self, keys: Iterable[Key]) -> set[Key]:
        """Those of these experts that are to stay, in slots or not yet."""
        self._choose_pins()
        return self._pins.intersection(keys)

    def use(self, keys: Iterable[Key]) -> None:
        """Experts in slots are used, one after the other."""
        order, passing, pins = self._order, self._passing, self._pins
        for key in keys:
            order.pop(key, None)
            order[key] = None
            if pins and key not in pins:
                passing.pop(key, None)
                passing[key] = None

    def remove(self, key: Key) -> None:
        """An expert has given its slot up."""
        self._order.pop(key, None)
        self._passing.pop(key, None)

    def victim(
        self, num_in_sweep: int, is_idle: Callable[[Key], bool], takes_pinned: bool = False
    ) -> Key | None:
        """The expert that gives its slot up in a sweep that asks for about `num_in_sweep` experts, of those
        that are idle; None if there is none. `takes_pinned`: a pinned one, if no other is idle."""
        demand = max(num_in_sweep, self._num_per_sweep)
        if not self._pins_always and self._num_slots >= PINNED_BELOW_SWEEPS * demand:
            return next(filter(is_idle, self._order), None)
        self._choose_pins()
        passing = next(filter(is_idle, self._passing), None)
        if passing is None and takes_pinned:
            return next(filter(is_idle, self._order), None)
        return passing

    def _choose_pins(self) -> None:
        if self._pins and self._uses.num_uses < self._next_choice:
            return
        self._next_choice = self._uses.num_uses + SWEEPS_PER_CHOICE * self._num_per_sweep
        self._pins = set(self._uses.most_used(self._num_pins, favoured=self._order))
        passing = {key: None for key in self._order if key not in self._pins}
        self._passing = passing if self._pins else self._order
