"""Peer: the machine at the other end of a channel, after the handshake. Sending never blocks its caller."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from penstock.nodes.wire.channel import Channel
from penstock.nodes.wire.frames import Frame, Kind

logger = logging.getLogger(__name__)


class Peer:
    """One thread sends what is queued, and a beat where there is nothing to send for a while; one reads."""

    def __init__(
        self,
        channel: Channel,
        timeout_s: float,
        take: Callable[[Frame], None],
        lose: Callable[[str], None],
    ) -> None:
        """take(frame) is called for each frame but beats, on the reading thread. lose(reason) is called once,
        when the connection has ended."""
        self.channel = channel
        #: Bytes of arrays that a frame may have; a caller that knows what comes raises it.
        self.limit = 0
        self._beat_s = timeout_s / 5
        self._take, self._lose = take, lose
        self._outgoing: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._ending = threading.Lock()
        self._is_lost = False
        self._threads = [
            threading.Thread(target=self._repeat, args=(work,), name=f"penstock-node-{name}", daemon=True)
            for name, work in (("send", self._send), ("read", self._read))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def send(self, frame: Frame) -> None:
        """Queue a frame; it is dropped if the connection has ended."""
        self._outgoing.put(frame)

    def close(self, reason: str = "this side has closed the connection") -> None:
        """End the connection. Any thread may call this, also the peer's own."""
        with self._ending:
            if self._is_lost:
                return
            self._is_lost = True
        self.channel.close()
        self._outgoing.put(None)
        self._lose(reason)

    def _repeat(self, work: Callable[[], None]) -> None:
        try:
            while not self._is_lost:
                work()
        except (OSError, ValueError) as error:  # ValueError: the socket was closed meanwhile
            self.close(str(error) or repr(error))
        except Exception as error:
            logger.exception("a message could not be sent or taken")
            self.close(repr(error))

    def _send(self) -> None:
        try:
            frame = self._outgoing.get(timeout=self._beat_s)
        except queue.Empty:
            frame = Frame(Kind.BEAT)
        if frame is not None:
            self.channel.send(frame)

    def _read(self) -> None:
        frame = self.channel.receive(lambda: self.limit)
        if frame.kind is not Kind.BEAT:
            self._take(frame)
