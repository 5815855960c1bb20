"""RequestStream: the outputs of one request, on the event loop. OpenStreams: those of all requests."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from types import TracebackType

from penstock.errors import DeadlineExceeded, InvalidParameter, PenstockError, QueueTimeout
from penstock.generation.requests.request import RequestOutput, too_late

#: Requests from which the rate is taken.
RATE_WINDOW = 256
MAX_RETRY_AFTER_S = 120


def retry_after_s(finished: Collection[float], now: float, num_parallel: int) -> int | None:
    """Seconds in which `num_parallel` requests finish, by the times at which the last ones finished. That is
    about as long as a request runs, and after it as many places have become free. None if no request has
    finished."""
    if not finished:
        return None
    seconds = num_parallel * (now - min(finished)) / len(finished)
    return min(MAX_RETRY_AFTER_S, max(1, math.ceil(seconds)))


class RequestStream:
    """Async iterator over one request's outputs; the last one has a finish_reason. Leaving an `async with`
    block, or abort(), frees the sequence."""

    def __init__(self, request_id: str, leave: Callable[[], None]) -> None:
        """`request_id` is the id that the outputs are given. leave() drops the request, if it has not ended;
        it is idempotent."""
        self.request_id = request_id
        self.leave = leave
        self._queue: asyncio.Queue[RequestOutput | PenstockError] = asyncio.Queue()
        self._is_finished = False
        self._num_tokens = 0

    def too_late(self) -> DeadlineExceeded:
        """What the caller is told whose time is up."""
        return too_late(self._num_tokens)

    def put(self, item: RequestOutput | PenstockError) -> None:
        """Called on the event loop."""
        if isinstance(item, RequestOutput):
            self._num_tokens += len(item.token_ids)
            if item.request_id != self.request_id:
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
            self.leave()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()


class OpenStreams:
    """The streams of the requests that run or wait, by the ids of their requests. Used on the event loop; the
    engine thread only looks into `aborted`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock() says the time in seconds."""
        self._clock = clock
        self._streams: dict[str, RequestStream] = {}
        #: What watches the times of these requests.
        self._timers: dict[str, list[asyncio.TimerHandle]] = {}
        #: When the last requests finished, since the engine was idle; seconds of the clock.
        self._finished: deque[float] = deque(maxlen=RATE_WINDOW)
        #: Ids of requests whose callers left, until the engine knows and all outputs that were under way have
        #: arrived. The engine thread reads the set between layers.
        self.aborted: set[str] = set()
        #: Requests that the engine computes at the same time.
        self.num_parallel = 1

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, key: str, abort: Callable[[], None]) -> RequestStream:
        """A stream for a new request. abort() is called once, if the caller leaves while the request is being
        computed. Raises InvalidParameter if the id is in use."""
        if key in self._streams or key in self.aborted:
            raise InvalidParameter("request_id", f"request {key} is being computed already")

        def leave() -> None:
            # Its request may have ended, and another one may have the same id now.
            if self._streams.get(key) is stream:
                self._close(key)
                self.aborted.add(key)
                abort()

        stream = self._streams[key] = RequestStream(key, leave)
        return stream

    def limit(self, key: str, at_s: float, error: Callable[[], PenstockError | None]) -> None:
        """At this time of the clock the request ends with an error, unless error() finds none. The engine
        does the same between two steps; here a step may take long, or hang."""
        if at_s == math.inf:
            return
        stream = self._streams[key]

        def look() -> None:
            if (found := error()) is not None:
                if isinstance(found, QueueTimeout):
                    found.retry_after_s = self.retry_after_s()
                stream.put(found)
                stream.leave()

        timer = asyncio.get_running_loop().call_later(max(0.0, at_s - self._clock()), look)
        self._timers.setdefault(key, []).append(timer)

    def _close(self, key: str) -> RequestStream | None:
        """The stream gets nothing more."""
        for timer in self._timers.pop(key, ()):
            timer.cancel()
        return self._streams.pop(key, None)

    def abort_all(self) -> None:
        """End the sweep that is being computed. The streams stay open until they are told why."""
        self.aborted.update(self._streams)

    def deliver(self, outputs: list[RequestOutput]) -> None:
        """Hand outputs to their streams; the streams of finished requests close."""
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # aborted in the meantime
            if isinstance(output.error, QueueTimeout):  # a request that never ran says nothing about the rate
                output.error.retry_after_s = self.retry_after_s()
            elif output.finish_reason is not None:
                self._finished.append(self._clock())
            stream.put(output.error or output)
            if output.finish_reason is not None:
                self._close(output.request_id)
        if not self._streams:
            self._finished.clear()  # an idle time says nothing about the rate

    def fail(self, key: str, error: PenstockError) -> None:
        """End a request with an error."""
        if (stream := self._close(key)) is not None:
            stream.put(error)

    def fail_all(self, error: PenstockError) -> None:
        for key in list(self._streams):
            self.fail(key, error)

    def retry_after_s(self) -> int | None:
        """In how many seconds a new request may find room; None if that is unknown."""
        return retry_after_s(self._finished, self._clock(), self.num_parallel)
