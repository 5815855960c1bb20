"""ExpertSlots: which experts are in the slots of a memory, and whose slot the next one gets. The lock of the
arrivals is held by the caller."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable

from penstock.spec import UnitKey
from penstock.weights.expert_table import ExpertTable
from penstock.weights.tiers.arrivals import Arrivals
from penstock.weights.tiers.expert_policy import ExpertPolicy
from penstock.weights.tiers.tier import Arrival


class ExpertSlots:
    """The policy decides among the experts that nobody uses or waits for."""

    def __init__(self, arrivals: Arrivals, policy: ExpertPolicy[UnitKey]) -> None:
        self._arrivals = arrivals
        self._policy = policy
        #: The experts that somebody uses; what they compute with gives no slot up.
        self.lent: dict[UnitKey, Arrival] = {}
        #: By stack and layer, tables from which experts are removed that give their slots up.
        self.tables: dict[tuple[str, int], ExpertTable] = {}
        #: Failed reads up to which _failed() found every expert that nobody can use.
        self._num_failures_seen = 0

    def arrived(self, keys: Iterable[UnitKey]) -> list[tuple[UnitKey, Arrival]]:
        """Those of these experts whose reads have ended, well or not."""
        find = self._arrivals.units.get
        return [
            (key, arrival)
            for key in keys
            if (arrival := find(key)) is not None and (arrival.is_there or arrival.read.done())
        ]

    def lend(self, group: Collection[tuple[UnitKey, Arrival]]) -> None:
        """Experts that are there are used until they are given back."""
        self.lent.update(group)
        self.use(group)

    def use(self, group: Collection[tuple[UnitKey, Arrival]]) -> None:
        """Experts that are there are used."""
        for _, arrival in group:
            arrival.is_there = True
        self._policy.use([key for key, _ in group])

    def begin(self, key: UnitKey) -> None:
        """Read an expert into a free slot."""
        self._arrivals.begin(key)
        self._policy.use((key,))

    def drop(self, key: UnitKey) -> None:
        """An expert gives its slot up."""
        self._policy.remove(key)
        self._arrivals.forget(key, self._arrivals.units[key])
        if (table := self.tables.get(key[:2])) is not None:
            table.remove(key.expert or 0)

    def cancel(self, key: UnitKey) -> bool:
        """Whether an expert gave up its slot of which nothing was read yet."""
        is_cancelled = self._arrivals.cancel(key)
        if is_cancelled:
            self._policy.remove(key)
        return is_cancelled

    def make_room(self, wanted: Container[UnitKey], num_in_sweep: int, takes_pinned: bool) -> bool:
        """Whether a slot is free, if need be the slot of an expert that is not used and not `wanted`. A sweep
        asks for about `num_in_sweep` experts. `takes_pinned`: nothing is lent whose slot could be waited
        for."""
        if self._arrivals.free_slots:
            return True
        lent = self.lent

        def is_idle(key: UnitKey) -> bool:
            arrival = self._arrivals.units[key]
            is_used = key in lent or arrival.num_users or key in wanted
            return not is_used and arrival.has_ended

        takes_pinned = takes_pinned and self._arrivals.clock.num_reads == 0
        given_up = self._failed(wanted) or self._policy.victim(num_in_sweep, is_idle, takes_pinned)
        if given_up is not None:
            self.drop(given_up)
        return given_up is not None

    def _failed(self, wanted: Container[UnitKey]) -> UnitKey | None:
        """An expert whose read failed and that nobody waits for."""
        if self._arrivals.clock.num_failures == self._num_failures_seen:
            return None
        units = self._arrivals.units
        found = next((key for key in units if units[key].has_failed and key not in wanted), None)
        if found is None:
            self._num_failures_seen = self._arrivals.clock.num_failures
        return found
