"""PipedSteps: Engine.step() where the layers are on several machines, and several steps on their way.

A machine that is lost takes all keys and values of its layers with it, also those that the prefix cache would
find for later requests. So all steps on their way are given up, nothing can be found any more, and every
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
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch

from penstock.errors import STEP_ERRORS, MachineAway, PenstockError, StepFailed
from penstock.generation.executor import Executor
from penstock.generation.model_inputs import ModelInputs
from penstock.generation.requests.request import RequestOutput
from penstock.generation.requests.request_table import RequestTable
from penstock.generation.sampler import Sampler
from penstock.generation.scheduling.batch import Batch
from penstock.generation.scheduling.scheduler import Scheduler
from penstock.generation.sequence import FinishReason
from penstock.generation.step_meter import StepMark, StepMeter
from penstock.memory.planning.plan import MemoryPlan
from penstock.nodes.leader import Leader
from penstock.nodes.member import NodeStatus
from penstock.nodes.step_pipe import Arrived, StepPipe
from penstock.nodes.wire.peer import Peer

logger = logging.getLogger(__name__)

#: Seconds after which step() returns though nothing has arrived, so that deadlines are looked at.
PATIENCE_S = 0.05
#: A step that takes longer than this many times what was predicted, and longer than so many seconds, is lost
#: with the machine that has it.
SLOWEST, LEAST_LIMIT_S = 20.0, 60.0


@dataclass
class _Flight:
    """A step on its way."""

    number: int
    batch: Batch
    #: The sequences that wait for it: Scheduler.launch().
    rest: Batch
    mark: StepMark
    limit_s: float


class PipedSteps:
    """Engine.step() of a leader."""

    def __init__(
        self,
        leader: Leader,
        executor: Executor,
        scheduler: Scheduler,
        requests: RequestTable,
        sampler: Sampler,
        meter: StepMeter,
        block_size: int,
    ) -> None:
        self._leader, self._executor, self._scheduler = leader, executor, scheduler
        self._requests, self._sampler, self._meter = requests, sampler, meter
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
    def num_flights(self) -> int:
        """Steps on their way."""
        return len(self._flights)

    def own_status(self, plan: MemoryPlan) -> NodeStatus:
        """How the leader's own machine is."""
        layers, leader = self._leader.layers, self._leader
        return NodeStatus(
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

    def step(self, aborted: Set[str]) -> list[RequestOutput]:
        """Launch steps until each machine has one, and end the oldest if it arrives soon. Raises
        StepFailed."""
        peers = self.look()
        whole = [peer for peer in peers if peer is not None]
        if len(whole) < len(peers):
            return self._wait()
        try:
            while len(self._flights) < len(peers) + 1 and self._launch(aborted, whole):
                pass
            return self._land()
        except BaseException:
            self._give_up()
            raise

    def look(self) -> tuple[Peer | None, ...]:
        """The connections to the machines. What was computed with machines that were lost, whether or not
        they are back, is forgotten."""
        if (peers := self._leader.peers) != self._peers:
            self._give_up()
            self._peers = peers
        return peers

    def _launch(self, aborted: Set[str], peers: Sequence[Peer]) -> bool:
        """Decide a step, compute the leader's layers, and send it on its way. False: there is none."""
        mark = self._meter.begin()
        batch = self._scheduler.schedule()
        if not batch:
            return False
        self._requests.start(batch, aborted)
        inputs = ModelInputs.of(batch, self._block_size)
        rest = self._scheduler.launch(batch)
        began_s = time.perf_counter()
        try:
            hidden = self._executor.sweep(inputs)
            self._busy_s += time.perf_counter() - began_s
        except STEP_ERRORS as error:
            raise self._fail(batch, str(error)) from error
        number = self._pipe.send(inputs, hidden, peers)
        predicted_s = self._meter.predict_s(batch.num_tokens) * (1 + len(self._flights))
        limit_s = max(LEAST_LIMIT_S, SLOWEST * predicted_s)
        self._flights.append(_Flight(number, batch, rest, mark, limit_s))
        return True

    def _land(self) -> list[RequestOutput]:
        """End the oldest step, if it arrives soon."""
        if not self._flights:
            return []
        arrived, flight = self._pipe.take(PATIENCE_S), self._flights[0]
        if self._leader.peers != self._peers:  # what came may be of a worker that has lost its blocks
            return []
        if arrived is None:
            if time.perf_counter() - flight.mark.began_s > flight.limit_s:
                self._drop_slow(flight)
            return []
        if arrived.hidden is None or arrived.number != flight.number:
            raise self._fail(flight.batch, arrived.fault or "a worker has mixed up two steps")
        self._waits_since_s = math.inf
        try:
            return self._end(self._flights.popleft(), arrived)
        except STEP_ERRORS as error:
            raise self._fail(flight.batch, str(error)) from error

    @torch.inference_mode()
    def _end(self, flight: _Flight, arrived: Arrived) -> list[RequestOutput]:
        assert arrived.hidden is not None
        began_s = time.perf_counter()
        chosen = self._sampler.sample(self._executor.logits(arrived.hidden), flight.rest)
        self._num_steps += 1
        self._busy_s += time.perf_counter() - began_s
        outputs = self._requests.deliver(self._scheduler.update(flight.rest, chosen))
        self._meter.record(flight.batch, chosen, outputs, flight.mark)
        self._meter.look_at(self._scheduler)
        return outputs

    def _give_up(self) -> None:
        """Nothing that is on its way counts any more, nor what was computed before, for whomever."""
        self._flights.clear()
        self._pipe.forget()
        self._scheduler.reset()
        self._meter.look_at(self._scheduler)

    def _fail(self, batch: Batch, reason: str) -> StepFailed:
        """A step can't be computed: its requests end, and the others compute their tokens again, since some
        of what stands in the blocks was never computed."""
        self._give_up()
        return self._requests.fail(batch, PenstockError(reason))

    def _drop_slow(self, flight: _Flight) -> None:
        for member in self._leader.members:
            if (peer := member.peer) is not None:
                peer.close(f"a step has taken more than {flight.limit_s:.0f} s")

    def _wait(self) -> list[RequestOutput]:
        """For the machines that are missing. Raises MachineAway when requests have waited long enough, also
        for a machine that comes and is lost again before any step ends."""
        missing, now = self._leader.missing, time.monotonic()
        if not missing:
            return []  # back at this moment
        ids = list(dict.fromkeys(each.request.request_id for each in self._scheduler))
        self._first_waiters &= set(ids)
        if not self._first_waiters:  # who comes later waits from now on
            self._waits_since_s, self._first_waiters = math.inf, set(ids)
        since_s = min(self._waits_since_s, *(member.away_since_s for member in missing))
        self._waits_since_s = min(self._waits_since_s, now)
        if now - since_s <= self._leader.nodes.return_s:
            self._leader.wait(PATIENCE_S)
            return []
        if not ids:
            return []
        names = "; ".join(f"rank {member.rank}: {member.reason}" for member in missing)
        for request_id in ids:
            self._requests.end(request_id, FinishReason.ERROR)
        self._meter.look_at(self._scheduler)
        self._waits_since_s = math.inf
        raise MachineAway(
            ids,
            f"machines that compute some of the layers have been away for {now - since_s:.0f} s ({names})",
        )
