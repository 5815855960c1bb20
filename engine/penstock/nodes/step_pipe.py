"""StepPipe: steps on their way through the workers, in order."""

from __future__ import annotations

import queue
from typing import NamedTuple

from torch import Tensor

from penstock.generation.model_inputs import ModelInputs
from penstock.nodes.leader import Leader
from penstock.nodes.member import Member
from penstock.nodes.step_frames import step_frame
from penstock.nodes.wire.frames import Frame, Kind


class Arrived(NamedTuple):
    """A step that has gone through all workers, or that one of them could not compute."""

    number: int
    hidden: Tensor | None = None
    #: Why a worker could not compute the step.
    fault: str = ""


class StepPipe:
    """The engine's thread sends and takes; the peers' threads pass on."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._members = leader.members
        self._arrived: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
        #: Steps on their way, by number.
        self._flying: dict[int, ModelInputs] = {}
        self._next = 0
        leader.on_result = self._pass_on

    def send(self, inputs: ModelInputs, hidden: Tensor) -> int:
        """Let the workers compute a step behind the leader's layers. Returns its number. A worker that is
        away gets nothing, and the step never arrives."""
        self._next += 1
        self._flying[self._next] = inputs
        self._send_to(0, self._next, inputs, hidden.to("cpu"))
        return self._next

    def take(self, timeout_s: float) -> Arrived | None:
        """The next step that has arrived; None if none has in this time."""
        try:
            found = self._arrived.get(timeout=timeout_s)
        except queue.Empty:
            return None
        return found if self._flying.pop(found.number, None) is not None else None

    def forget(self) -> None:
        """All steps on their way are lost; what still comes of them is dropped."""
        self._flying.clear()

    def _send_to(self, place: int, number: int, inputs: ModelInputs, hidden: Tensor) -> None:
        peer, is_last = self._members[place].peer, place == len(self._members) - 1
        if peer is not None:
            peer.send(step_frame(number, inputs, hidden, returns_all=not is_last))

    def _pass_on(self, member: Member, frame: Frame) -> None:
        """On the reading thread of a member."""
        number = frame.fields.get("number")
        inputs = self._flying.get(number) if type(number) is int else None
        if type(number) is not int or inputs is None:
            return
        hidden, place = frame.arrays.get("hidden"), member.rank - 1
        if frame.kind is Kind.FAILED or hidden is None:
            self._arrived.put(Arrived(number, fault=f"rank {member.rank}: {frame.fields.get('reason')}"))
        elif place + 1 < len(self._members):
            self._send_to(place + 1, number, inputs, hidden)
        else:
            self._arrived.put(Arrived(number, hidden))
