"""TextThread: turns texts into token ids and back. Long texts take long, and would hold up the event loop."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from penstock.errors import QueueFull
from penstock_server.telemetry.request_info import current_request

T = TypeVar("T")

#: The most texts that may wait. Each may be as large as a request.
MAX_WAITING = 1024
#: Characters of a short text, or bytes of a short request, whose tokens take about a tenth of a second.
MAX_SHORT = 1 << 16


class TextThread:
    """Two threads for all tokenizing: one for short requests, which never wait for a long one, and one for
    the long ones. More threads would take cores from the engine."""

    def __init__(self) -> None:
        self._short, self._long = _Lane("text"), _Lane("long-text")

    async def run(self, work: Callable[[], T], num_chars: int = 0) -> T:
        """The result of `work`, which runs on one of the threads. Raises what `work` raises, and QueueFull.

        num_chars: characters that `work` tokenizes, where they are more than the request's body has.
        """
        num_waiting = self._short.num_waiting + self._long.num_waiting
        if num_waiting >= MAX_WAITING:
            raise QueueFull(f"{num_waiting} texts wait to be read, which is the limit")
        request = current_request.get()
        size, client = (0, "") if request is None else (request.num_body_bytes, request.client)
        lane = self._short if max(size, num_chars) <= MAX_SHORT else self._long
        result: T = await lane.run(client, work)
        return result

    def close(self) -> None:
        self._short.close()
        self._long.close()


class _Lane:
    """A thread, and the works that wait for it. Clients take turns: one of each client's works is next, by
    age. A work whose request was cancelled is left out."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        #: Client -> its works. The client whose turn is next comes first.
        self._waiting: OrderedDict[str, deque[tuple[Callable[[], Any], asyncio.Future[Any]]]] = OrderedDict()
        self._is_busy = False
        self.num_waiting = 0

    async def run(self, client: str, work: Callable[[], Any]) -> Any:
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append((work, future))
        self.num_waiting += 1
        try:
            self._begin_next()
            return await future
        finally:
            self.num_waiting -= 1

    def _begin_next(self) -> None:
        while self._waiting and not self._is_busy:
            client, works = next(iter(self._waiting.items()))
            work, future = works.popleft()
            if not works:
                del self._waiting[client]
            if future.done():
                continue
            if works:
                self._waiting.move_to_end(client)
            self._is_busy = True
            running = asyncio.get_running_loop().run_in_executor(self._thread, work)
            running.add_done_callback(partial(self._end, future))

    def _end(self, future: asyncio.Future[Any], done: asyncio.Future[Any]) -> None:
        self._is_busy = False
        if future.done():
            done.cancelled() or done.exception()  # nobody wants it any more
        elif done.cancelled():
            future.cancel()
        elif (error := done.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(done.result())
        self._begin_next()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
