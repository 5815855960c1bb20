"""Worker: a machine that computes some layers for a leader, and decides nothing.

It looks for its leader until it is told to stop. What it has loaded stays loaded while the leader is away, so
a leader that starts again, or a link that comes back, finds it ready.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from penstock.config import EngineConfig
from penstock.errors import CapacityError, CheckpointError, ConfigError, PenstockError
from penstock.memory.hardware import HardwareProfile, capacities
from penstock.nodes.identity import own_program
from penstock.nodes.part import Part
from penstock.nodes.part_holder import PartHolder
from penstock.nodes.wire import handshake
from penstock.nodes.wire.channel import Channel
from penstock.nodes.wire.frames import Frame, Kind, WireError
from penstock.nodes.wire.handshake import Refused
from penstock.nodes.wire.peer import Peer
from penstock.nodes_config import NodesConfig

logger = logging.getLogger(__name__)

#: Seconds between two tries to find the leader: the first, and the longest.
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 5.0


class Worker:
    """One machine's part in one model. run() on any thread; stop() from another one."""

    def __init__(
        self,
        nodes: NodesConfig,
        config: EngineConfig,
        *,
        model: str = "",
        offline: bool = False,
        hardware: Callable[[str], HardwareProfile] = lambda model: capacities(),
        cache_folder: Path | None = None,
    ) -> None:
        """`model`: where the model lies on this machine; "": as the leader calls it. hardware(model) measures
        the machine. Raises ConfigError."""
        self._nodes, self._tls = nodes, nodes.tls()
        self._stopping = threading.Event()
        self._holder = PartHolder(
            config, hardware, self._stopping.is_set, model=model, offline=offline, cache_folder=cache_folder
        )
        self._peer: Peer | None = None

    def run(self) -> None:
        """Until stop(). Raises ConfigError if the leader refuses this machine for good."""
        retry_s = FIRST_RETRY_S
        try:
            while not self._stopping.is_set():
                try:
                    channel = self._find()
                    retry_s = FIRST_RETRY_S
                    self._serve(channel)
                except Refused as error:
                    if error.is_final:
                        raise ConfigError(f"the leader at {self._address} refuses: {error}") from None
                    logger.warning("the leader at %s: %s; trying again", self._address, error)
                except OSError as error:
                    logger.log(
                        logging.INFO if retry_s == FIRST_RETRY_S else logging.DEBUG,
                        "no leader at %s (%s); trying again", self._address, error.strerror or error,
                    )  # fmt: skip
                self._stopping.wait(retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)
        finally:
            self._holder.drop()

    def stop(self) -> None:
        """End run() soon."""
        self._stopping.set()
        if (peer := self._peer) is not None:
            peer.close("this worker was stopped")

    @property
    def part(self) -> Part | None:
        """What is planned or loaded; for tests."""
        return self._holder.part

    @property
    def _address(self) -> str:
        return f"{self._nodes.host}:{self._nodes.port}"

    def _find(self) -> Channel:
        """A channel to the leader, greeted. Raises Refused and OSError."""
        timeout_s = self._nodes.timeout_s
        connection = socket.create_connection((self._nodes.host, self._nodes.port), timeout_s)
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_hostname=self._nodes.host)
            channel = Channel(connection, timeout_s)
            handshake.greet(channel, self._nodes.secret, own_program() | {"rank": self._nodes.rank})
        except BaseException:
            connection.close()
            raise
        logger.info("rank %d has found its leader at %s", self._nodes.rank, self._address)
        return channel

    def _serve(self, channel: Channel) -> None:
        """Obey until the connection ends."""
        frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        lost: list[str] = []

        def lose(reason: str) -> None:
            lost.append(reason)
            frames.put(None)

        self._peer = peer = Peer(channel, self._nodes.timeout_s, frames.put, lose)
        peer.limit = self._holder.limit
        peer.start()
        try:
            while not self._stopping.is_set() and (frame := frames.get()) is not None:
                self._obey(frame, peer)
        finally:
            peer.close()
            self._peer = None
        if not self._stopping.is_set():
            logger.warning("the leader at %s is lost: %s", self._address, lost[0])

    def _obey(self, frame: Frame, peer: Peer) -> None:
        if frame.kind not in (Kind.ASK, Kind.STEP):
            raise WireError(f"{frame.kind.name} came, which no worker obeys")
        try:
            if frame.kind is Kind.STEP:
                peer.send(self._holder.step(frame))
            else:
                peer.send(Frame(Kind.ANSWER, self._holder.answer(frame.fields, peer)))
        except WireError:
            raise
        except (PenstockError, OSError) as error:  # a file or memory of this machine is no lost link
            logger.error("%s", error)
            peer.send(_failed(frame, error))
        except Exception as error:  # what ended the worker would end the next one in its place, too
            logger.exception("the leader's %s could not be carried out", frame.kind.name)
            peer.send(_failed(frame, error))


def _failed(frame: Frame, error: Exception) -> Frame:
    """The answer to a frame that could not be obeyed, with the kind of error that the leader raises in its
    turn."""
    kinds = ((CapacityError, "capacity"), (ConfigError, "config"), (CheckpointError, "checkpoint"))
    fault = next((name for kind, name in kinds if isinstance(error, kind)), "other")
    number, reason = frame.fields.get("number"), str(error) or repr(error)
    return Frame(Kind.FAILED, {"number": number, "fault": fault, "reason": reason})
