"""Publisher: sends events of the prefix cache to routers, over ZeroMQ, as vLLM does.

Subscribers of the PUB socket get (topic, sequence number in 8 bytes, batch). Who asks the ROUTER socket for a
number gets the batches from that number on that are still kept, and then the number -1 with an empty batch.
One thread has the sockets. A step never waits for it: batches that its queue has no room for are lost, and
since they have had their numbers, subscribers see the gap. An error costs the batch or the replay that met
it; the log tells of the first one."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from penstock.config import KVEventsConfig
from penstock.errors import ConfigError
from penstock.generation.blocks.block_log import BlockEvent, BlockLog
from penstock.generation.scheduling.scheduler import Scheduler
from penstock.generation.step_observer import StepObserver
from penstock.kv_events import wire
from penstock.kv_events.event_sockets import EventSockets
from penstock.metrics import KVEventStats

logger = logging.getLogger(__name__)

#: Seconds in which a server that ends sends what is left.
CLOSE_S = 1.0
#: Seconds between looks at the socket for replays.
_LOOK_S = 0.05
_NUMBER_BYTES = 8
#: After the last batch of a replay.
END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)


class _Batch(NamedTuple):
    number: int
    time_s: float
    events: Sequence[BlockEvent]


class Publisher(StepObserver):
    """Close the publisher."""

    def __init__(self, config: KVEventsConfig, block_size: int) -> None:
        """Opens the sockets. Raises ConfigError if that can't be done, or if the extra is not installed."""
        self.stats = KVEventStats()
        #: The block manager tells it what happens to blocks.
        self.log = BlockLog(block_size)
        self._config = config
        self._block_size = block_size
        zmq, self._pack = _libraries()
        self._next_number = 0
        self._queue = queue.Queue[_Batch | None](config.max_queue_size)
        self._kept = deque[tuple[int, bytes]](maxlen=config.buffer_steps)
        self._topic = config.topic.encode()
        self._closes_at_s: float | None = None
        self._has_failed = False
        self._counting = threading.Lock()
        self._sockets = EventSockets(zmq, config)
        self._publishing, self._replaying = self._sockets.publishing, self._sockets.replaying
        self._thread = threading.Thread(target=self._run, name="penstock-kv-events", daemon=True)
        self._thread.start()

    def after(self, scheduler: Scheduler) -> None:
        self.publish(self.log.take())

    def publish(self, events: Sequence[BlockEvent]) -> None:
        """Send a batch, if there are events. Never blocks. For one thread."""
        if not events:
            return
        batch = _Batch(self._next_number, time.time(), events)
        self._next_number += 1
        try:
            self._queue.put_nowait(batch)
        except queue.Full:
            if not self.stats.dropped_batches:
                logger.warning(
                    "--kv-events-config: %d batches of events wait, more are lost: subscribers see a gap in "
                    "the sequence numbers. A larger max_queue_size keeps more",
                    self._config.max_queue_size,
                )
            self._count_dropped()

    def close(self) -> None:
        """Send what is left, within CLOSE_S, and close the sockets."""
        self._closes_at_s = time.monotonic() + CLOSE_S
        with contextlib.suppress(queue.Full):  # the thread sees the time, and does not wait for more
            self._queue.put(None, timeout=CLOSE_S)
        self._thread.join()
        self._sockets.close(CLOSE_S)

    def _run(self) -> None:
        while self._closes_at_s is None or time.monotonic() < self._closes_at_s:
            try:
                batch = self._queue.get(timeout=None if self._replaying is None else _LOOK_S)
            except queue.Empty:
                batch = None
            if batch is None and self._closes_at_s is not None:
                return
            if batch is not None and not self._try(self._send, batch):
                self._count_dropped()
            if self._replaying is not None:
                self._try(self._answer_replays)

    def _try(self, action: Callable[..., None], *given: _Batch) -> bool:
        """Whether there was no error. Without this thread, all later batches would be lost."""
        try:
            action(*given)
        except Exception:
            if not self._has_failed:
                logger.exception(
                    "--kv-events-config: events could not be sent. The engine goes on, subscribers see a gap "
                    "in the sequence numbers, and kv_events_dropped_batches counts what is lost from now on"
                )
            self._has_failed = True
            return False
        return True

    def _count_dropped(self) -> None:
        """On either thread."""
        with self._counting:
            self.stats.dropped_batches += 1

    def _answer_replays(self) -> None:
        while self._replaying.poll(0):
            self._replay(self._replaying.recv_multipart())

    def _send(self, batch: _Batch) -> None:
        payload = self._pack(wire.batch(batch.events, batch.time_s, self._block_size))
        number = batch.number.to_bytes(_NUMBER_BYTES, "big")
        self._publishing.send_multipart((self._topic, number, payload))
        self._kept.append((batch.number, payload))
        self.stats.sent_batches += 1
        self.stats.sent_bytes += len(payload)

    def _replay(self, frames: list[bytes]) -> None:
        """Answer a client of the socket for replays: (client, b"", the first wanted number)."""
        if len(frames) != 3 or len(frames[2]) != _NUMBER_BYTES:
            logger.warning("--kv-events-config: a request for a replay was not understood")
            return
        client, first = frames[0], int.from_bytes(frames[2], "big")
        for number, payload in self._kept:
            if number >= first:
                parts = (client, b"", number.to_bytes(_NUMBER_BYTES, "big"), payload)
                self._replaying.send_multipart(parts)
        self._replaying.send_multipart((client, b"", END, b""))


def _libraries() -> tuple[Any, Any]:
    """The module zmq, and a function that packs. Raises ConfigError."""
    try:
        import zmq

        return zmq, wire.packer()
    except ImportError:
        raise ConfigError(
            "--kv-events-config needs libraries that are not installed: pip install 'penstock-llm[events]'"
        ) from None
