"""StepObserver: whatever follows the steps of an engine without having a part in them: a meter, a publisher
of events, tiers of keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List

from penstock.generation.chosen import Chosen
from penstock.generation.requests.request import RequestOutput
from penstock.generation.scheduling.batch import Batch
from penstock.generation.scheduling.scheduler import Scheduler


class StepObserver:
    """The engine's thread calls all methods. This class does nothing, so that an observer has only the
    methods that it needs. Where several steps are in flight, they end in the order in which they began."""

    def before(self, scheduler: Scheduler) -> None:
        """A step is about to be scheduled."""

    def scheduled(self, batch: Batch) -> None:
        """The step contains this."""

    def computed(self, batch: Batch, chosen: List[Chosen], outputs: List[RequestOutput]) -> None:
        """A step has ended: the oldest one in flight that was not given up. `chosen` has what was chosen for
        each of the sequences that waited for the step, `outputs` what their requests gained."""

    def stalled(self) -> None:
        """Nothing can be computed now, though there is work. An observer may wait for a moment."""

    def after(self, scheduler: Scheduler) -> None:
        """A call of the engine is over: a step was tried, or requests have ended without one."""


class StepObservers(StepObserver):
    """Tells each of several observers, in their order."""

    def __init__(self, observers: List[StepObserver]) -> None:
        self._all = tuple(observers)

    def __iter__(self) -> Iterator[StepObserver]:
        return iter(self._all)

    def before(self, scheduler: Scheduler) -> None:
        for each in self._all:
            each.before(scheduler)

    def scheduled(self, batch: Batch) -> None:
        for each in self._all:
            each.scheduled(batch)

    def computed(self, batch: Batch, chosen: List[Chosen], outputs: List[RequestOutput]) -> None:
        for each in self._all:
            each.computed(batch, chosen, outputs)

    def stalled(self) -> None:
        for each in self._all:
            each.stalled()

    def after(self, scheduler: Scheduler) -> None:
        for each in self._all:
            each.after(scheduler)
