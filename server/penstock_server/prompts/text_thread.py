"""TextThread: turns texts into token ids and back. Long texts take long, and would hold up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.errors import QueueFull

T = TypeVar("T")

#: The most texts that may wait. Each may be as large as a request.
MAX_WAITING = 1024


class TextThread:
    """A thread for all tokenizing. The tokenizer could serve several threads at once, but they would take
    cores from the engine."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._num_waiting = 0

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, which runs on the thread. Raises what `work` raises, and QueueFull."""
        if self._num_waiting >= MAX_WAITING:
            raise QueueFull(f"{self._num_waiting} texts wait to be read, which is the limit")
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
