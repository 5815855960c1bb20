"""Worker: a machine that computes some layers for a leader, and decides nothing.

It looks for its leader until it is told to stop. What it has loaded stays loaded while the leader is away, so
a leader that starts again, or a link that comes back, finds it ready.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig
from penstock.errors import CapacityError, CheckpointError, ConfigError, PenstockError
from penstock.loader import settle_processor
from penstock.memory.hardware import HardwareProfile, capacities
from penstock.nodes.identity import model_digest, own_program
from penstock.nodes.orders import SHARED, Order, Planned, Survey
from penstock.nodes.part import Part, open_part, survey
from penstock.nodes.step_frames import read_step, step_bytes
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
        self._nodes, self._config = nodes, config
        self._model, self._offline, self._cache_folder = model, offline, cache_folder
        self._measure = hardware
        self._tls = nodes.tls()
        self._part: Part | None = None
        #: What the last leader asked, and the answers: of a machine with nothing loaded.
        self._surveyed: tuple[tuple[str, dict[str, Any]], Survey] | None = None
        self._offered: tuple[Order, Planned] | None = None
        self._stopping = threading.Event()
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
            self._drop_part()

    def stop(self) -> None:
        """End run() soon."""
        self._stopping.set()
        if (peer := self._peer) is not None:
            peer.close("this worker was stopped")

    @property
    def part(self) -> Part | None:
        """What is planned or loaded; for tests."""
        return self._part

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
        if self._part is not None:
            peer.limit = self._limit(self._part)
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
                peer.send(self._step(frame))
            else:
                peer.send(Frame(Kind.ANSWER, self._answer(frame.fields, peer)))
        except WireError:
            raise
        except (PenstockError, OSError) as error:  # a file or memory of this machine is no lost link
            logger.error("%s", error)
            peer.send(_failed(frame, error))
        except Exception as error:  # what ended the worker would end the next one in its place, too
            logger.exception("the leader's %s could not be carried out", frame.kind.name)
            peer.send(_failed(frame, error))

    def _step(self, frame: Frame) -> Frame:
        part = self._part
        if part is None or not part.is_loaded:
            raise ConfigError("a step came before the model was loaded")
        cache = part.loaded.model.executor.kv_cache
        number, inputs, hidden, wanted = read_step(frame, cache.num_blocks, cache.block_size)
        if hidden.shape[1] != part.loaded.model.spec.row_size:
            raise WireError("a step's hidden states are of another model")
        began_s = time.perf_counter()
        found = part.compute(inputs, hidden, wanted)
        seconds = time.perf_counter() - began_s
        return Frame(Kind.RESULT, {"number": number, "seconds": seconds}, {"hidden": found})

    def _answer(self, ask: dict[str, Any], peer: Peer) -> dict[str, Any]:
        """Raises PenstockError."""
        match ask.get("what"):
            case "survey":
                return self._survey(str(ask.get("model", "")), ask.get("settings"))
            case "plan":
                return asdict(self._planned(Order.of(ask)))
            case "load":
                return self._load(Order.of(ask), peer)
        raise ConfigError(f"the leader asks for {str(ask.get('what'))[:40]!r}, which no worker does")

    def _survey(self, name: str, settings: object) -> dict[str, Any]:
        if not isinstance(settings, dict) or settings.keys() - set(SHARED):
            raise ConfigError("the leader's settings make no sense")
        model, asked = self._model or name, (name, settings)
        config = Order(name, "", settings, 0, 1).config(self._config)
        opened = open_part(model, config, self._offline)
        try:
            if not self._is_loaded or self._surveyed is None or self._surveyed[0] != asked:
                self._drop_part()  # its memory counts as free
                self._surveyed = asked, survey(opened, config, self._measure(model))
            return asdict(replace(self._surveyed[1], digest=model_digest(opened)))
        finally:
            opened.store.close()

    @property
    def _is_loaded(self) -> bool:
        return self._part is not None and self._part.is_loaded

    def _planned(self, order: Order) -> Planned:
        """What is planned for an order, or was before its layers were loaded."""
        if not self._is_loaded or self._offered is None or self._offered[0] != order:
            self._plan(order)
            assert self._part is not None
            self._offered = order, self._part.planned
        return self._offered[1]

    def _plan(self, order: Order) -> None:
        self._drop_part()
        model = self._model or order.model
        hardware = self._measure(model)
        settle_processor(order.config(self._config), hardware)
        self._part = Part.plan(order, model, self._config, self._offline, hardware, self._cache_folder)

    def _load(self, order: Order, peer: Peer) -> dict[str, Any]:
        if self._part is None or not self._part.serves(order):
            self._plan(order)
            assert self._part is not None
            self._part.load(self._cache_folder)
            self._part.loaded.model.streamer.tiers.wait_until_loaded(self._report(peer))
            logger.info("layers %d to %d are loaded", order.first, order.stop - 1)
        assert self._part is not None
        peer.limit = self._limit(self._part)
        return asdict(self._part.planned)

    def _report(self, peer: Peer) -> Callable[[int, int], None]:
        def report(num_loaded: int, num_total: int) -> None:
            if self._stopping.is_set():
                raise ConfigError("this worker was stopped while it was loading")
            peer.send(Frame(Kind.ANSWER, {"loaded": num_loaded, "total": num_total}))

        return report

    def _limit(self, part: Part) -> int:
        if not part.is_loaded:
            return 0
        model, config = part.loaded.model, part.loaded.config
        num_blocks = model.executor.kv_cache.num_blocks
        return step_bytes(config.max_num_batched_tokens, config.max_num_seqs, num_blocks, model.spec.row_size)

    def _drop_part(self) -> None:
        if self._part is not None:
            with contextlib.suppress(OSError):
                self._part.close()
            self._part = None


def _failed(frame: Frame, error: Exception) -> Frame:
    """The answer to a frame that could not be obeyed, with the kind of error that the leader raises in its
    turn."""
    kinds = ((CapacityError, "capacity"), (ConfigError, "config"), (CheckpointError, "checkpoint"))
    fault = next((name for kind, name in kinds if isinstance(error, kind)), "other")
    number, reason = frame.fields.get("number"), str(error) or repr(error)
    return Frame(Kind.FAILED, {"number": number, "fault": fault, "reason": reason})
