"""The thread on which texts become token ids and back: long ones take long, and the event loop can't wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.errors import QueueFull

T = TypeVar("T")

#: Most texts that may wait; they are as large as a request may be.
MAX_WAITING = 1024


class TextThread:
    """One thread: tokenizers are not made for several at once."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._num_waiting = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Raises what `work` raises, and QueueFull."""
        if self._num_waiting >= MAX_WAITING:
            raise QueueFull(f"{self._num_waiting} texts wait to be read, and no more may")
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
