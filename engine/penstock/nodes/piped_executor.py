"""PipedExecutor: the StepExecutor where the layers are on several machines, and several steps in flight.

A machine that is lost takes all keys and values of its layers with it, also those that the prefix cache would
find for later requests. So all steps in flight are given up, nothing can be found any more, and every
running sequence waits and computes its tokens again when the machine, or another one in its place, is ready.
The tokens that were chosen are the leader's, and the bits do not depend on the way, so an answer goes on as
if nothing had been. If the machine stays away for longer than NodesConfig.return_s, all requests end with an
error.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from penstock.errors import MachineAway
from penstock.generation.executor import Executor
from penstock.generation.model_inputs import ModelInputs
from penstock.generation.scheduling.batch import Batch
from penstock.generation.scheduling.scheduler import Scheduler
from penstock.generation.step_executor import ComputedStep, StepLost
from penstock.memory.planning.plan import MemoryPlan
from penstock.nodes.leader import Leader
from penstock.nodes.member import NodeStatus
from penstock.nodes.step_pipe import StepPipe

logger = logging.getLogger(__name__)

#: Seconds after which collect() returns though nothing has arrived, so that deadlines are looked at.
PATIENCE_S = 0.05
#: A step that takes longer than this many times what was predicted, and longer than so many seconds, is lost
#: with the machine that has it.
SLOWEST, LEAST_LIMIT_S = 20.0, 60.0


@dataclass(frozen=True)
class _Flight:
    """A step in flight."""

    number: int
    batch: Batch
    #: The sequences that wait for it: Scheduler.launch().
    waiting: Batch
    began_s: float
    limit_s: float


class PipedExecutor:
    """Computes the leader's layers, and sends each step through the workers."""

    def __init__(
        self,
        leader: Leader,
        executor: Executor,
        scheduler: Scheduler,
        predict_s: Callable[[int], float],
        block_size: int,
    ) -> None:
        """`executor` has the leader's layers. predict_s: tokens of a step -> seconds on all machines; 0:
        unknown."""
        self.leader = leader
        self._executor, self._scheduler, self._predict_s = executor, scheduler, predict_s
        self._block_size = block_size
        self._pipe = StepPipe(leader)
        self._flights: deque[_Flight] = deque()
        #: The connections over which all keys and values were computed.
        self._peers = leader.peers
        #: Of this machine: steps, and seconds that it computed them.
        self._num_steps, self._busy_s = 0, 0.0
        #: When requests began to wait for a machine, if no step has ended since.
        self._waits_since_s = math.inf
        #: These requests have waited since that moment and have not ended.
        self._first_waiters: set[str] = set()

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    @property
    def has_room(self) -> bool:
        return len(self._flights) < len(self._peers) + 1

    def status(self, plan: MemoryPlan) -> tuple[NodeStatus, ...]:
        """All machines, by rank; `plan` is the leader's own. Safe from any thread."""
        layers, leader = self.leader.layers, self.leader
        own = NodeStatus(
            0,
            "",
            "ready",
            "",
            (layers.start, layers.stop),
            plan.num_resident_layers,
            plan.device_used_bytes or plan.host_used_bytes,
            plan.device_budget_bytes or plan.host_budget_bytes,
            len(layers),
            True,
            self._num_steps,
            self._busy_s,
            0,
            None,
            leader.own_step_s,
        )
        return (own, *leader.status())

    def call_on_change(self, callback: Callable[[], None]) -> None:
        self.leader.on_change = callback

    def is_able(self) -> bool:
        """Raises MachineAway."""
        self.look()
        if all(self._peers):
            return True
        self._wait()
        return False

    def look(self) -> None:
        """What was computed with machines that were lost, whether or not they are back, is forgotten."""
        if (peers := self.leader.peers) != self._peers:
            self._give_up()
            self._peers = peers

    def launch(self, batch: Batch, is_cancelled: Callable[[], bool]) -> None:
        """Compute the leader's layers, and send the step on its way, which nothing cancels."""
        began_s = time.perf_counter()
        inputs = ModelInputs.of(batch, self._block_size)
        waiting = self._scheduler.launch(batch)
        swept_s = time.perf_counter()
        hidden = self._executor.sweep(inputs)
        self._busy_s += time.perf_counter() - swept_s
        number = self._pipe.send(inputs, hidden, [peer for peer in self._peers if peer is not None])
        predicted_s = self._predict_s(batch.num_tokens) * (1 + len(self._flights))
        limit_s = max(LEAST_LIMIT_S, SLOWEST * predicted_s)
        self._flights.append(_Flight(number, batch, waiting, began_s, limit_s))

    def collect(self) -> ComputedStep | None:
        if not self._flights:
            return None
        arrived, flight = self._pipe.take(PATIENCE_S), self._flights[0]
        if self.leader.peers != self._peers:  # what came may be of a worker that has lost its blocks
            return None
        if arrived is None:
            if time.perf_counter() - flight.began_s > flight.limit_s:
                self._drop_slow(flight)
            return None
        if arrived.hidden is None or arrived.number != flight.number:
            raise StepLost(flight.batch, arrived.fault or "a worker has mixed up two steps")
        self._waits_since_s = math.inf
        self._flights.popleft()
        self._num_steps += 1
        return ComputedStep(flight.batch, flight.waiting, self._logits(arrived.hidden))

    def drop(self, batch: Batch) -> None:
        """All keys and values are forgotten, since some of what stands in the blocks was never computed."""
        self._give_up()

    def _logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """The time counts until the last part is taken."""
        began_s = time.perf_counter()
        yield from self._executor.logits(hidden)
        self._busy_s += time.perf_counter() - began_s

    def _give_up(self) -> None:
        """Nothing in flight counts any more, nor what was computed before, for any request."""
        self._flights.clear()
        self._pipe.forget()
        self._scheduler.reset()

    def _drop_slow(self, flight: _Flight) -> None:
        for member in self.leader.members:
            if (peer := member.peer) is not None:
                peer.close(f"a step has taken more than {flight.limit_s:.0f} s")

    def _wait(self) -> None:
        """For the machines that are missing. Raises MachineAway when requests have waited long enough, also
        for a machine that comes and is lost again before any step ends."""
        missing, now = self.leader.missing, time.monotonic()
        if not missing:
            return  # back at this moment
        ids = list(dict.fromkeys(each.request.request_id for each in self._scheduler))
        self._first_waiters &= set(ids)
        if not self._first_waiters:  # who comes later waits from now on
            self._waits_since_s, self._first_waiters = math.inf, set(ids)
        since_s = min(self._waits_since_s, *(member.away_since_s for member in missing))
        self._waits_since_s = min(self._waits_since_s, now)
        if now - since_s <= self.leader.nodes.return_s:
            self.leader.wait(PATIENCE_S)
            return
        if not ids:
            return
        names = "; ".join(f"rank {member.rank}: {member.reason}" for member in missing)
        self._waits_since_s = math.inf
        raise MachineAway(
            ids,
            f"machines that compute some of the layers have been away for {now - since_s:.0f} s ({names})",
        )
