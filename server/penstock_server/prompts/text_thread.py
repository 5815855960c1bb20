"""TextThread: turns texts into token ids and back. Long texts take long, and would hold up the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from penstock.errors import QueueFull
from penstock_server.telemetry.request_info import current_request

T = TypeVar("T")

#: The most texts that may wait. Each may be as large as a request.
MAX_WAITING = 1024
#: Characters of a short text, or bytes of a short request, whose tokens take about a tenth of a second.
MAX_SHORT = 1 << 16
#: Seconds of a short request's turn. A work that takes longer mostly waits for another process, for example
#: for the trial of a grammar, which takes a second at worst. It goes on beside the next ones.
TURN_S = 0.05
#: The most works that go on beyond their turn, of all clients and of one.
MAX_LATE, MAX_LATE_OF_CLIENT = 3, 2


class TextThread:
    """Two threads for all tokenizing: one for short requests, which never wait for a long one, and one for
    the long ones. More threads would take cores from the engine. Short requests that turn out to take long
    get a few more threads, so that the others need not wait for them."""

    def __init__(self) -> None:
        self._short, self._long = _Lane("text", MAX_LATE), _Lane("long-text", 0)

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


@dataclass(frozen=True, eq=False)
class _Turn:
    """A work that has begun."""

    client: str
    future: asyncio.Future[Any]


class _Lane:
    """A thread, and the works that wait for it. Clients take turns: one of each client's works is next, by
    age. A work whose request was cancelled is left out. A work that takes longer than TURN_S becomes late:
    it goes on, and the next one begins on another thread."""

    def __init__(self, name: str, max_late: int) -> None:
        self._threads = ThreadPoolExecutor(1 + max_late, thread_name_prefix=name)
        self._max_late = max_late
        #: Client -> its works. The client whose turn is next comes first.
        self._waiting: OrderedDict[str, deque[tuple[Callable[[], Any], asyncio.Future[Any]]]] = OrderedDict()
        self._turn: _Turn | None = None
        #: Client -> the number of its works that are late.
        self._late = Counter[str]()
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
        while self._turn is None and (client := self._next_client()) is not None:
            works = self._waiting[client]
            work, future = works.popleft()
            if not works:
                del self._waiting[client]
            if future.done():
                continue
            if works:
                self._waiting.move_to_end(client)
            self._turn = turn = _Turn(client, future)
            running = asyncio.get_running_loop().run_in_executor(self._threads, work)
            running.add_done_callback(partial(self._end, turn))
            if self._max_late:
                self._limit(turn)

    def _next_client(self) -> str | None:
        return next((client for client in self._waiting if self._late[client] < MAX_LATE_OF_CLIENT), None)

    def _limit(self, turn: _Turn) -> None:
        asyncio.get_running_loop().call_later(TURN_S, self._let_pass, turn)

    def _let_pass(self, turn: _Turn) -> None:
        if self._turn is not turn:
            return
        if self._late.total() == self._max_late:
            self._limit(turn)
            return
        self._late[turn.client] += 1
        self._turn = None
        self._begin_next()

    def _end(self, turn: _Turn, done: asyncio.Future[Any]) -> None:
        if self._turn is turn:
            self._turn = None
        else:
            self._late -= Counter([turn.client])  # leaves out who has none any more
        future = turn.future
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
        self._threads.shutdown(wait=False, cancel_futures=True)
