"""Batch: an AsyncBatch for callers without an event loop. It runs on an event loop in its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Generator, Iterable, Iterator
from typing import Any, Generic, TypeVar

from penstock_client._async.session import AsyncSession
from penstock_client._async.transport import AsyncTransport
from penstock_client._sync.session import Session
from penstock_client.assembler import R
from penstock_client.async_batch import AsyncBatch, BatchResult, P
from penstock_client.batch_options import BatchOptions, PromptRequests

T = TypeVar("T")


class Batch(Generic[P, R], Iterator[BatchResult[P, R]]):
    """An iterator of results. The thread starts with the first `next` and ends with the last.

    Leaving a `with` early, or dropping the iterator, ends the requests that still run.
    """

    def __init__(
        self,
        session: Session,
        prompts: Iterable[P],
        requests: PromptRequests[R],
        options: BatchOptions,
    ) -> None:
        """Raises ValueError for a session with a client of the HTTP library that others gave."""
        if not session.transport.is_own:
            raise ValueError(
                "a batch runs on a thread of its own and can't use this client's http_client; use "
                "AsyncClient with an httpx2.AsyncClient"
            )
        transport = AsyncTransport(session.settings)
        twin = AsyncSession(session.settings, session.policy, session.model, transport, asyncio.sleep)
        self._results = _results(transport, AsyncBatch(twin, prompts, requests, options))

    def __iter__(self) -> Batch[P, R]:
        return self

    def __next__(self) -> BatchResult[P, R]:
        return next(self._results)

    def __enter__(self) -> Batch[P, R]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the requests that still run. No more results come."""
        self._results.close()


def _results(transport: AsyncTransport, batch: AsyncBatch[P, R]) -> Generator[BatchResult[P, R], None, None]:
    worker = _LoopThread()
    try:
        while (result := worker.call(_next(batch))) is not None:
            yield result
    finally:
        worker.end_call()
        worker.call(batch.aclose())
        worker.call(transport.aclose())
        worker.close()


async def _next(batch: AsyncBatch[P, R]) -> BatchResult[P, R] | None:
    return await anext(batch, None)


class _LoopThread:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[Any] | None = None
        # A daemon: an interpreter that exits does not wait for a batch that was never closed.
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-batch", daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of `coroutine`, which runs in the thread."""

        async def run() -> T:
            self._task = asyncio.current_task()
            return await coroutine

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def end_call(self) -> None:
        """Cancel a call that was left by an exception here, such as KeyboardInterrupt."""

        async def end() -> None:
            # _task is read here, in the loop, because the call has certainly begun by now.
            task = self._task
            if task is not None and not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()

    def close(self) -> None:
        self.call(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
