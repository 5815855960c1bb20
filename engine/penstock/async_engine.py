"""AsyncEngine: the one thread that loads and steps an Engine, and a queue per request.

The event loop never waits for a step: it hands commands to the thread through a queue and gets outputs
by call_soon_threadsafe. Delivery never blocks the thread: a request's queue is bounded by its max_tokens, and
the number of requests by max_num_seqs + max_queued_seqs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Literal

from penstock.engine import Engine
from penstock.errors import (
    EngineDead,
    EngineStopped,
    InvalidParameter,
    PenstockError,
    QueueFull,
    QueueTimeout,
    RequestFailed,
    StepFailed,
)
from penstock.generation.generation_request import GenerationRequest, SamplingParams, ValidRequest
from penstock.generation.request import RequestOutput

logger = logging.getLogger(__name__)

#: Requests from which the rate is taken.
RATE_WINDOW = 256
MAX_RETRY_AFTER_S = 120


def retry_after_s(finished: Collection[float], now: float, num_parallel: int) -> int | None:
    """Seconds in which `num_parallel` requests finish, by the times at which the last ones did: about as long
    as a request runs, and then as many places have become free. None if none has finished."""
    if not finished:
        return None
    seconds = num_parallel * (now - min(finished)) / len(finished)
    return min(MAX_RETRY_AFTER_S, max(1, math.ceil(seconds)))


@dataclass(frozen=True)
class EngineStatus:
    """How the engine is, for /health."""

    state: Literal["loading", "ready", "dead", "stopped"]
    loaded_layers: int
    total_layers: int
    error: str | None = None


@dataclass(frozen=True)
class _Abort:
    key: str


class _Stop:
    pass


class RequestStream:
    """Async iterator over one request's outputs; the last has a finish_reason. Leaving an `async with`
    block, or abort(), frees the sequence."""

    def __init__(self, request_id: str, abort: Callable[[], None]) -> None:
        """`request_id` is what its outputs are given."""
        self.request_id = request_id
        self._abort = abort
        self._queue: asyncio.Queue[RequestOutput | PenstockError] = asyncio.Queue()
        self._is_finished = False

    def put(self, item: RequestOutput | PenstockError) -> None:
        """Called on the event loop."""
        if isinstance(item, RequestOutput) and item.request_id != self.request_id:
            item = replace(item, request_id=self.request_id)
        self._queue.put_nowait(item)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """Raises EngineDead, StepFailed, or the RequestFailed that ended this request."""
        if self._is_finished:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, PenstockError):
            self._is_finished = True
            raise item
        self._is_finished = item.finish_reason is not None
        return item

    def abort(self) -> None:
        """Idempotent; never blocks. The sweep in progress ends at the next layer if nobody else is in it."""
        if not self._is_finished:
            self._is_finished = True
            self._abort()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()


class AsyncEngine:
    """An Engine on a thread of its own, for one event loop."""

    def __init__(
        self,
        load: Callable[[Callable[[int, int], None]], Engine],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """load(report_progress) makes the engine; it runs on the engine's thread. clock() says the time in
        seconds, on any thread."""
        self._load = load
        self._clock = clock
        self._commands: queue.SimpleQueue[ValidRequest | _Abort | _Stop] = queue.SimpleQueue()
        #: By the ids of their requests.
        self._streams: dict[str, RequestStream] = {}
        #: When the last requests finished, since the engine was idle; seconds of the clock.
        self._finished: deque[float] = deque(maxlen=RATE_WINDOW)
        #: Ids of requests whose callers left, until the engine knows and all outputs that were under way have
        #: arrived. Changed on the event loop, read by the engine thread between layers.
        self._aborted: set[str] = set()
        self._status = EngineStatus("loading", 0, 0)
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._settled: asyncio.Event | None = None
        self._ended: asyncio.Event | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)

    def start(self) -> None:
        """Begin to load. Call it on the event loop that will use the engine."""
        self._loop = asyncio.get_running_loop()
        self._settled, self._ended = asyncio.Event(), asyncio.Event()
        self._thread.start()

    @property
    def status(self) -> EngineStatus:
        """Never blocks."""
        return self._status

    @property
    def engine(self) -> Engine:
        """The loaded engine. Raises EngineDead while there is none."""
        if self._engine is None or self._status.state != "ready":
            kind = EngineStopped if self._status.state == "stopped" else EngineDead
            raise kind(self._status.error or f"the engine is {self._status.state}")
        return self._engine

    async def wait_until_ready(self) -> None:
        """Raises EngineDead with the reason if loading failed."""
        assert self._settled is not None, "start() comes first"
        await self._settled.wait()
        _ = self.engine

    async def wait_until_ended(self) -> None:
        """Until the engine was stopped. Raises EngineDead with the reason if it ended by itself."""
        assert self._ended is not None, "start() comes first"
        await self._ended.wait()
        if self._status.state == "dead":
            raise EngineDead(self._status.error or "")

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
        or was given up this moment) and QueueFull at once, EngineDead if there is no engine.
        """
        valid, key = self.engine.validate(request), request.request_id
        if key in self._streams or key in self._aborted:
            raise InvalidParameter("request_id", f"request {key} is being computed already")
        if len(self._streams) >= self.max_requests:
            raise QueueFull(
                f"{len(self._streams)} requests run or wait, and no more may", self._retry_after_s()
            )
        stream = self._streams[key] = RequestStream(key, partial(self._abort, key))
        self._commands.put(valid)
        return stream

    def _retry_after_s(self) -> int | None:
        return retry_after_s(self._finished, self._clock(), self.engine.config.max_num_seqs)

    async def stop(self) -> None:
        """Abort everything and end the thread, after the layer that it is computing or loading."""
        self._is_stopping = True
        self._aborted.update(self._streams)
        self._commands.put(_Stop())
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def _abort(self, key: str) -> None:
        self._streams.pop(key, None)
        self._aborted.add(key)
        self._commands.put(_Abort(key))

    # ------------------------------------------------------------ on the event loop, from the thread

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # aborted in the meantime
            if isinstance(output.error, QueueTimeout):  # this one says nothing about the rate
                output.error.retry_after_s = self._retry_after_s()
            elif output.finish_reason is not None:
                self._finished.append(self._clock())
            stream.put(output.error or output)
            if output.finish_reason is not None:
                del self._streams[output.request_id]
        if not self._streams:
            self._finished.clear()  # an idle time says nothing about the rate

    def _fail(self, key: str, error: PenstockError) -> None:
        stream = self._streams.pop(key, None)
        if stream is not None:
            stream.put(error)

    def _settle(self, status: EngineStatus) -> None:
        """The thread is ready, or at its end: everybody who waits learns of it."""
        self._status = status
        assert self._settled is not None and self._ended is not None
        self._settled.set()
        if status.state == "ready":
            return
        self._ended.set()
        is_dead = status.state == "dead"
        reason = EngineDead(status.error or "") if is_dead else EngineStopped("the engine was stopped")
        for key in list(self._streams):
            self._fail(key, reason)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            logger.debug("an output came after the event loop had closed")

    # ------------------------------------------------------------ the engine thread

    def _run(self) -> None:
        try:
            self._engine = engine = self._load(self._report_progress)
            status = self._status
            ready = EngineStatus("ready", status.loaded_layers, status.total_layers)
            self._call(self._settle, ready)
            while self._obey(engine):
                self._step(engine)
        except EngineStopped:
            self._call(self._settle, EngineStatus("stopped", 0, 0))
        except PenstockError as error:
            self._die(str(error))
        except BaseException as error:  # the last line of defence, for panics of Rust's too: never vanish
            logger.exception("the engine thread failed")
            self._die(f"internal error: {error!r}")
        else:
            self._call(self._settle, EngineStatus("stopped", 0, 0))
        finally:
            if self._engine is not None:
                self._engine.close()

    def _step(self, engine: Engine) -> None:
        if expired := engine.expire(self._clock()):
            self._call(self._deliver, expired)
        try:
            outputs = engine.step(self._aborted)
        except StepFailed as error:
            logger.error("a step failed: %s", error)
            for key in error.request_ids:
                self._call(self._fail, key, error)
        else:
            if outputs:
                self._call(self._deliver, outputs)

    def _die(self, error: str) -> None:
        status = self._status
        what = "the model can't be loaded" if status.state == "loading" else "the engine is dead"
        logger.error("%s: %s", what, error)
        self._call(self._settle, EngineStatus("dead", status.loaded_layers, status.total_layers, error))

    def _report_progress(self, loaded: int, total: int) -> None:
        if self._is_stopping:
            raise EngineStopped("the engine was stopped while it was loading")
        self._status = EngineStatus("loading", loaded, total)

    def _obey(self, engine: Engine) -> bool:
        """Carry out all commands; waits for one if there is no work. False: stop."""
        while not (self._commands.empty() and engine.has_work):
            command = self._commands.get()
            if isinstance(command, _Stop):
                return False
            if isinstance(command, _Abort):
                engine.abort(command.key)
                self._call(self._aborted.discard, command.key)
            else:
                self._begin(engine, command)
        return True

    def _begin(self, engine: Engine, request: ValidRequest) -> None:
        try:
            engine.add(request)
        except PenstockError as error:
            logger.error("a request failed: %s", error, exc_info=error.__cause__)
            self._call(self._fail, request.request_id, error)
        except Exception:  # it is queued last of all, so that nothing of it is left
            logger.exception("a request could not be taken")
            failure = RequestFailed("the engine could not take it; the log says why")
            self._call(self._fail, request.request_id, failure)
