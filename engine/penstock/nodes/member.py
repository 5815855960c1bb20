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
    """How one machine is, for whoever asks."""

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
        self.order: Order | None = None
        self.planned: Planned | None = None
        self.arithmetic = ""
        self.num_steps = self.num_losses = self.num_loaded = 0
        self.busy_s = 0.0
        self.away_since_s = time.monotonic()
        self._address = ""
        self._on_result, self._on_change = on_result, on_change
        self._answers: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._lock = threading.Lock()

    @property
    def is_connected(self) -> bool:
        return self.peer is not None

    def join(self, peer: Peer) -> None:
        """The worker is there. take() and lose() of the peer are this member's."""
        self._answers = queue.SimpleQueue()
        self.peer, self._address = peer, peer.channel.address
        self._set("here", "it has not loaded yet")

    def take(self, frame: Frame) -> None:
        """A frame of the peer."""
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
            self._answers.put(frame)

    def lose(self, reason: str) -> None:
        """The peer's connection has ended."""
        self.num_losses += 1
        self.away_since_s = time.monotonic()
        logger.warning("rank %d at %s is lost: %s", self.rank, self._address, reason)
        self._answers.put(None)
        self.state, self.reason = "away", reason
        self.peer = None  # last: now another worker may join
        self._on_change()

    def ask(self, what: str, fields: dict[str, Any]) -> dict[str, Any]:
        """The answer. Raises MemberLost, and the worker's own error as CapacityError, ConfigError or
        CheckpointError."""
        with self._lock:
            answers, peer = self._answers, self.peer
            if peer is None or answers is not self._answers:  # lost, and perhaps here again
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
        assert self.order is not None
        self._set("loading", "it loads its layers")
        try:
            planned = Planned.of(self.ask("load", asdict(self.order)))
        except MemberLost:
            return None
        except PenstockError as error:
            logger.error("%s", error)
            self._set("failed", str(error))
            return error
        self.planned = planned
        self.num_loaded = len(self.order.layers)
        logger.info("rank %d is ready: layers %d to %d", self.rank, self.order.first, self.order.stop - 1)
        self._set("ready", "")
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
        )

    def _set(self, state: State, reason: str) -> None:
        self.state, self.reason = state, reason
        self._on_change()
