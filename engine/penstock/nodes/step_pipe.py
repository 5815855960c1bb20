"""StepPipe: steps on their way through the workers, in order."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from penstock.generation.model_inputs import ModelInputs
from penstock.nodes.leader import Leader
from penstock.nodes.member import Member
from penstock.nodes.step_frames import step_frame
from penstock.nodes.wire.frames import Frame, Kind
from penstock.nodes.wire.peer import Peer


class Arrived(NamedTuple):
    """A step that has gone through all workers, or that one of them could not compute."""

    number: int
    hidden: Tensor | None = None
    #: Why a worker could not compute the step.
    fault: str = ""


class _Flying(NamedTuple):
    """A step on its way."""

    inputs: ModelInputs
    #: The connections by which it goes. It never arrives if one of them is lost.
    peers: Sequence[Peer]


class StepPipe:
    """The engine's thread sends and takes; the peers' threads pass on."""

    def __init__(self, leader: Leader) -> None:
        self._arrived: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
        #: Steps on their way, by number.
        self._flying: dict[int, _Flying] = {}
        self._next = 0
        leader.on_result = self._pass_on

    def send(self, inputs: ModelInputs, hidden: Tensor, peers: Sequence[Peer]) -> int:
        """Let the workers compute a step after the leader's layers. Returns its number."""
        self._next += 1
        self._flying[self._next] = flying = _Flying(inputs, peers)
        self._send_to(0, self._next, flying, hidden.to("cpu"))
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

    def _send_to(self, place: int, number: int, flying: _Flying, hidden: Tensor) -> None:
        is_last = place == len(flying.peers) - 1
        flying.peers[place].send(step_frame(number, flying.inputs, hidden, returns_all=not is_last))

    def _pass_on(self, member: Member, frame: Frame) -> None:
        """On the reading thread of a member."""
        number = frame.fields.get("number")
        flying = self._flying.get(number) if type(number) is int else None
        if type(number) is not int or flying is None:
            return
        hidden, place = frame.arrays.get("hidden"), member.rank - 1
        if frame.kind is Kind.FAILED or hidden is None:
            self._arrived.put(Arrived(number, fault=f"rank {member.rank}: {frame.fields.get('reason')}"))
        elif place + 1 < len(flying.peers):
            self._send_to(place + 1, number, flying, hidden)
        else:
            self._arrived.put(Arrived(number, hidden))
