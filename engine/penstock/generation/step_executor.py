"""StepExecutor: computes the steps that the scheduler decides, on this machine or on several."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from torch import Tensor

from penstock.errors import PenstockError
from penstock.generation.executor import Executor
from penstock.generation.model_inputs import ModelInputs
from penstock.generation.scheduling.batch import Batch
from penstock.generation.scheduling.scheduler import Scheduler


class ComputedStep(NamedTuple):
    """A step whose layers are computed."""

    batch: Batch
    #: The part of it whose sequences wait for the step: Scheduler.update() gets it.
    waiting: Batch
    #: Of the rows that are wanted: float32 [some, vocab_size], part after part. A part is computed when it is
    #: asked for, and raises what Executor.logits() raises.
    logits: Iterable[Tensor]


class StepLost(PenstockError):
    """A step in flight can't be computed."""

    def __init__(self, batch: Batch, reason: str) -> None:
        super().__init__(reason)
        self.batch = batch


class StepExecutor(Protocol):
    """Takes steps in order, and gives them back in the same order. Used by the engine's thread."""

    @property
    def num_in_flight(self) -> int:
        """Steps that were launched and not collected."""

    def is_able(self) -> bool:
        """Whether steps can be computed now. If not, the answer comes after a moment. Raises StepFailed for
        requests that have waited too long."""

    @property
    def has_room(self) -> bool:
        """Whether another step may be launched before the oldest is collected."""

    def launch(self, batch: Batch, is_cancelled: Callable[[], bool]) -> None:
        """Compute a step, or begin to. Raises what Executor.forward() raises."""

    def collect(self) -> ComputedStep | None:
        """The oldest step. None: no step is in flight, or it has not come in a moment. Raises StepLost."""

    def drop(self, batch: Batch) -> None:
        """This step has failed. All steps in flight are given up with it, and their sequences wait."""

    def look(self) -> None:
        """Notice, between two steps, what was lost."""

    def call_on_change(self, callback: Callable[[], None]) -> None:
        """Have the callback called, on any thread, when there is something to notice by look()."""


#: (index of a layer, hidden states after it).
Listen = Callable[[int, Tensor], None]


class LocalExecutor:
    """This machine computes all layers, one step at a time."""

    num_in_flight = 0

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        block_size: int,
        listen: Callable[[Batch], Listen | None] = lambda batch: None,
    ) -> None:
        """listen(batch): who gets the hidden states after each layer of this step; None: nobody."""
        self._executor, self._scheduler, self._block_size = executor, scheduler, block_size
        self._listen = listen
        self._computed: ComputedStep | None = None

    def is_able(self) -> bool:
        return True

    @property
    def has_room(self) -> bool:
        return self._computed is None

    def launch(self, batch: Batch, is_cancelled: Callable[[], bool]) -> None:
        inputs = ModelInputs.of(batch, self._block_size)
        logits = self._executor.forward(inputs, is_cancelled, self._listen(batch))
        self._computed = ComputedStep(batch, batch, logits)

    def collect(self) -> ComputedStep | None:
        computed, self._computed = self._computed, None
        return computed

    def drop(self, batch: Batch) -> None:
        self._computed = None
        if batch:
            self._scheduler.rollback(batch)

    def look(self) -> None: ...

    def call_on_change(self, callback: Callable[[], None]) -> None: ...
