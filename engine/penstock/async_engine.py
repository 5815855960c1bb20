"""AsyncEngine: an Engine on a thread of its own, for one event loop.

The event loop never waits for a step: requests go to the thread through a queue, and outputs come back
through one queue per request. Delivery never blocks the thread: the queue of a request holds at most as many
outputs as the request's max_tokens, and there are at most max_num_seqs + max_queued_seqs requests.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from functools import partial

from penstock.engine import Engine
from penstock.engine_thread import Abort, EngineStatus, EngineThread
from penstock.errors import EngineDead, EngineStopped, QueueFull, QueueTimeout
from penstock.generation.requests.generation_request import GenerationRequest, SamplingParams
from penstock.generation.requests.request import waited_too_long
from penstock.request_stream import OpenStreams, RequestStream
from penstock.step_watch import Trouble

logger = logging.getLogger(__name__)


class AsyncEngine:
    """Takes requests on the event loop and gives each a stream of outputs."""

    def __init__(
        self,
        load: Callable[[Callable[[int, int], None]], Engine],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """load(report_progress) makes the engine; it runs on the engine's thread. clock() says the time in
        seconds, on any thread."""
        self._clock = clock
        self._streams = OpenStreams(clock)
        self._thread = EngineThread(load, clock, self._streams, self._settle, self._leave)
        #: What the thread said last, when it was ready or at its end; None while the engine is loading.
        self._settled_as: EngineStatus | None = None
        self._settled: asyncio.Event | None = None
        self._ended: asyncio.Event | None = None
        #: Set when the thread has ended and everything is closed.
        self._left: asyncio.Event | None = None
        #: The thread did not end when it should have.
        self._hangs = False

    def start(self) -> None:
        """Begin to load. Call start() on the event loop that will use the engine."""
        self._settled, self._ended, self._left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._thread.start(asyncio.get_running_loop())

    @property
    def status(self) -> EngineStatus:
        """Never blocks."""
        return self._settled_as or self._thread.progress

    @property
    def trouble(self) -> Trouble | None:
        """Why requests should go elsewhere, though the engine is ready: steps fail, or one hangs. Never
        blocks."""
        if (engine := self._thread.engine) is None or self.status.state != "ready":
            return None
        layer_s = engine.meter.predict_s(engine.config.max_num_batched_tokens) / engine.streamer.num_layers
        return self._thread.watch.trouble(engine.streamer.moved_s, layer_s)

    @property
    def engine(self) -> Engine:
        """The loaded engine. Raises EngineDead while there is none."""
        status, engine = self.status, self._thread.engine
        if engine is None or status.state != "ready":
            kind = EngineStopped if status.state == "stopped" else EngineDead
            raise kind(status.error or f"the engine is {status.state}")
        return engine

    async def wait_until_ready(self) -> None:
        """Raises EngineDead with the reason if loading failed."""
        assert self._settled is not None, "start() comes first"
        await self._settled.wait()
        _ = self.engine

    async def wait_until_ended(self) -> None:
        """Until the engine was stopped. Raises EngineDead with the reason if the engine ended by itself."""
        assert self._ended is not None, "start() comes first"
        await self._ended.wait()
        if self.status.state == "dead":
            raise EngineDead(self.status.error or "")

    @property
    def max_requests(self) -> int:
        """Most requests that may run and wait. Raises EngineDead if there is no engine."""
        config = self.engine.config
        return config.max_num_seqs + config.max_queued_seqs

    def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        client: str = "",
        cache_salt: str = "",
        queue_timeout_s: float | None = None,
        deadline_s: float | None = None,
    ) -> RequestStream:
        """submit() with keywords. The stream's outputs carry the `request_id`, which need not be unique.

        queue_timeout_s, deadline_s: seconds from now until start_by and finish_by; None: no limit.
        """
        start_by, finish_by = (
            math.inf if limit_s is None else self._clock() + limit_s
            for limit_s in (queue_timeout_s, deadline_s)
        )
        request = GenerationRequest(
            prompt_token_ids,
            params,
            priority=priority,
            client=client,
            cache_salt=cache_salt,
            start_by=start_by,
            finish_by=finish_by,
        )
        stream = self.submit(request)
        stream.request_id = request_id or request.request_id
        return stream

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Queue a request.

        Raises ContextOverflow and InvalidParameter (as Engine.validate() does, and for an id that is in use
        or was aborted this moment) and QueueFull at once, EngineDead if there is no engine.
        """
        valid, key = self.engine.validate(request), request.request_id
        # Requests whose callers left are counted separately: a step that hangs keeps them in the engine.
        if (number := max(len(self._streams), len(self._streams.aborted))) >= self.max_requests:
            raise QueueFull(
                f"{number} requests run or wait already, which is the limit", self._streams.retry_after_s()
            )
        stream = self._streams.open(key, partial(self._thread.put, Abort(key)))
        self._streams.limit(key, request.finish_by, stream.too_late)
        self._streams.limit(key, request.start_by, partial(self._waited_too_long, key))
        self._thread.put(valid)
        return stream

    def _waited_too_long(self, key: str) -> QueueTimeout | None:
        """What a request is told that has not begun when it should have."""
        engine = self._thread.engine
        return None if engine is not None and engine.has_started(key) else waited_too_long()

    async def stop(self, timeout_s: float | None = None) -> bool:
        """Abort everything and end the thread, after the layer that it is computing or loading. False: it has
        not ended in so many seconds, since something hangs; all requests have ended, and only the end of the
        process ends the thread."""
        self._streams.abort_all()
        self._thread.ask_to_stop()
        if self._left is None:
            return True  # it was never started
        if self._hangs:
            return False
        try:
            await asyncio.wait_for(self._left.wait(), timeout_s)
        except TimeoutError:
            logger.error(
                "the engine does not end in %g s: a read hangs, or a layer takes long to compute", timeout_s
            )
            self._hangs = True
            self._settle(EngineStatus("stopped", 0, 0))
            return False
        return True

    def _leave(self) -> None:
        assert self._left is not None
        self._left.set()

    def _settle(self, status: EngineStatus) -> None:
        """The engine is ready, or the thread is at its end: everybody who waits learns of it."""
        self._settled_as = status
        assert self._settled is not None and self._ended is not None
        if status.state == "ready":
            self._streams.num_parallel = self.engine.config.max_num_seqs
        self._settled.set()
        if status.state == "ready":
            return
        self._ended.set()
        is_dead = status.state == "dead"
        self._streams.fail_all(
            EngineDead(status.error or "") if is_dead else EngineStopped("the engine was stopped")
        )
