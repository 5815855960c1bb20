"""Member: a worker as its leader sees it, from one connection to the next."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from penstock.errors import CapacityError, CheckpointError, ConfigError, PenstockError
from penstock.nodes.orders import Order, Planned
from penstock.nodes.wire.channel import Channel
from penstock.nodes.wire.frames import Frame, Kind
from penstock.nodes.wire.peer import Peer

logger = logging.getLogger(__name__)

State = Literal["away", "here", "loading", "ready", "failed"]
_ERRORS: dict[str, type[PenstockError]] = {
    "capacity": CapacityError, "config": ConfigError, "checkpoint": CheckpointError,
}  # fmt: skip


class MemberLost(Exception):
    """The connection ended before an answer came."""


@dataclass(frozen=True)
class NodeStatus:
    """How one machine is, for status pages."""

    rank: int
    address: str
    state: State
    #: Why it is not ready, for people; "" if it is.
    reason: str
    layers: tuple[int, int]
    num_resident: int
    used_bytes: int
    budget_bytes: int
    num_loaded: int
    #: It rounds as the leader does: the same build of the kernels on the same kind of processor.
    rounds_alike: bool
    #: Steps that it computed, seconds that it took for them, and how often it was lost.
    num_steps: int
    busy_s: float
    num_losses: int
    #: Seconds for which it has been away; None if it is not.
    away_s: float | None
    #: Seconds that a step of one token should take there; 0 if that is unknown.
    step_s: float


class Member:
    """Threads: the reading thread of the present peer brings frames; any thread may ask for the status."""

    def __init__(
        self, rank: int, on_result: Callable[[Member, Frame], None], on_change: Callable[[], None]
    ) -> None:
        """on_result(self, frame): a RESULT, or a FAILED with a step's number. on_change(): the state has
        changed."""
        self.rank = rank
        self.state: State = "away"
        self.reason = "it has not come yet"
        self.peer: Peer | None = None
        #: The peer, if it has loaded what it was ordered to, so that it takes steps. A peer that was lost is
        #: never this again: each connection has a Peer of its own.
        self.ready: Peer | None = None
        self.order: Order | None = None
        self.planned: Planned | None = None
        self.arithmetic = ""
        self.num_steps = self.num_losses = self.num_loaded = 0
        self.busy_s = 0.0
        self.away_since_s = time.monotonic()
        self._address = ""
        self._on_result, self._on_change = on_result, on_change
        self._answers: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._asking = threading.Lock()
        self._changing = threading.Lock()

    @property
    def is_connected(self) -> bool:
        return self.peer is not None

    def join(self, channel: Channel, timeout_s: float) -> None:
        """The worker is there, and is greeted."""
        answers: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        peer = Peer(
            channel,
            timeout_s,
            lambda frame: self._take(frame, answers),
            lambda reason: self._lose(reason, answers),
        )
        with self._changing:
            self._answers = answers
            self.peer, self._address = peer, channel.address
            self.state, self.reason = "here", "it has not loaded yet"
            self.num_loaded = 0
        self._on_change()
        peer.start()

    def _take(self, frame: Frame, answers: queue.SimpleQueue[Frame | None]) -> None:
        """A frame of a peer, whose answers go there."""
        if frame.kind is Kind.RESULT or (
            frame.kind is Kind.FAILED and frame.fields.get("number") is not None
        ):
            seconds = frame.fields.get("seconds")
            self.num_steps += 1
            self.busy_s += seconds if isinstance(seconds, float) else 0.0
            self._on_result(self, frame)
        elif frame.kind is Kind.ANSWER and "loaded" in frame.fields:
            self.num_loaded = int(frame.fields["loaded"])
        elif frame.kind in (Kind.ANSWER, Kind.FAILED):
            answers.put(frame)

    def _lose(self, reason: str, answers: queue.SimpleQueue[Frame | None]) -> None:
        """A peer's connection has ended."""
        logger.warning("rank %d at %s is lost: %s", self.rank, self._address, reason)
        with self._changing:
            self.num_losses += 1
            self.away_since_s = time.monotonic()
            self.state, self.reason, self.ready = "away", reason, None
            answers.put(None)
            self.peer = None  # last: now another worker may join
        self._on_change()

    def ask(self, what: str, fields: dict[str, Any]) -> dict[str, Any]:
        """The answer. Raises MemberLost, and the worker's own error as CapacityError, ConfigError or
        CheckpointError."""
        with self._asking:
            with self._changing:
                answers, peer = self._answers, self.peer
            if peer is None:
                raise MemberLost(f"rank {self.rank} is away")
            peer.send(Frame(Kind.ASK, fields | {"what": what}))
            frame = answers.get()
        if frame is None:
            raise MemberLost(f"rank {self.rank} was lost")
        if frame.kind is Kind.FAILED:
            kind = _ERRORS.get(str(frame.fields.get("fault")), PenstockError)
            raise kind(f"rank {self.rank} ({self._address}): {frame.fields.get('reason')}")
        return frame.fields

    def load(self) -> PenstockError | None:
        """Let the worker load what it was ordered to. Returns what went wrong there."""
        order, peer = self.order, self.peer
        assert order is not None
        self._set(peer, "loading", "it reads its layers")
        try:
            planned = Planned.of(self.ask("load", asdict(order)))
        except MemberLost:
            return None
        except PenstockError as error:
            logger.error("%s", error)
            self._set(peer, "failed", str(error))
            return error
        self.planned = planned
        self.num_loaded = len(order.layers)
        if self._set(peer, "ready", ""):
            logger.info("rank %d is ready: layers %d to %d", self.rank, order.first, order.stop - 1)
        return None

    def status(self, own_arithmetic: str) -> NodeStatus:
        order, planned = self.order, self.planned
        return NodeStatus(
            self.rank,
            self._address,
            self.state,
            self.reason,
            (order.first, order.stop) if order else (0, 0),
            planned.num_resident if planned else 0,
            planned.used_bytes if planned else 0,
            planned.budget_bytes if planned else 0,
            self.num_loaded,
            self.arithmetic in ("", own_arithmetic),
            self.num_steps,
            self.busy_s,
            self.num_losses,
            time.monotonic() - self.away_since_s if self.state == "away" else None,
            planned.step_s(1) if planned else 0.0,
        )

    def _set(self, peer: Peer | None, state: State, reason: str) -> bool:
        """Note what a peer's answer says. False: the peer was lost meanwhile, and another one may be here."""
        with self._changing:
            if peer is None or peer is not self.peer:
                return False
            self.state, self.reason = state, reason
            self.ready = peer if state == "ready" else None
        self._on_change()
        return True
