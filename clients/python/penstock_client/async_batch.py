"""AsyncBatch: answers to many prompts, a bounded number at a time. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sized
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock_client._async.session import AsyncSession
from penstock_client._async.streams import AsyncStream
from penstock_client.assembler import R
from penstock_client.batch_options import BatchOptions, PromptRequests
from penstock_client.errors import PenstockError
from penstock_client.patience import Patience, Tries
from penstock_client.progress import Tally, reporter
from penstock_client.retries import RetryPolicy

P = TypeVar("P")

#: The most results that may wait for an earlier result or for the reader, per worker.
_WINDOW = 4


@dataclass(frozen=True)
class BatchResult(Generic[P, R]):
    """The result of one prompt: either an answer or an error. index: the prompt's number, from 0.

    num_attempts: how often the prompt was sent; more than once if the server was busy or restarted.
    """

    index: int
    prompt: P
    answer: R | None
    error: PenstockError | None
    num_attempts: int

    def unwrap(self) -> R:
        """The answer. Raises the error if there is no answer."""
        if self.answer is None:
            raise self.error or AssertionError("a result has an answer or an error")
        return self.answer


class AsyncBatch(Generic[P, R], AsyncIterator[BatchResult[P, R]]):
    """An iterator of results. Nothing begins before the first `anext`.

    Leaving an `async with` early, or dropping the batch, ends the requests that still run.
    """

    def __init__(
        self,
        session: AsyncSession,
        prompts: Iterable[P],
        requests: PromptRequests[R],
        options: BatchOptions,
    ) -> None:
        # No running task refers to this object, so that the caller can drop it.
        self._results = _Run(session, prompts, requests, options).results()

    def __aiter__(self) -> AsyncBatch[P, R]:
        return self

    async def __anext__(self) -> BatchResult[P, R]:
        return await anext(self._results)

    async def __aenter__(self) -> AsyncBatch[P, R]:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the requests that still run. No more results come."""
        await self._results.aclose()


class _Run(Generic[P, R]):
    """`concurrency` workers take prompts from one iterator and put results into one queue."""

    def __init__(
        self,
        session: AsyncSession,
        prompts: Iterable[P],
        requests: PromptRequests[R],
        options: BatchOptions,
    ) -> None:
        if isinstance(prompts, str):
            # A str is iterable, but nobody means one prompt per character.
            raise TypeError(f"a batch takes several prompts, such as a list, not the text {prompts!r:.100}")
        self._prompts = enumerate(prompts)
        self._total = len(prompts) if isinstance(prompts, Sized) else None
        self._session, self._requests, self._options = session, requests, options
        self._patience = Patience(options.patience_s)
        # A prompt takes a place when it begins, and gives it back when its result is read.
        self._places = asyncio.Semaphore(options.concurrency * _WINDOW)
        # None: a worker found no more prompts. An exception: not an error of the server, so it ends the
        # batch.
        self._done: asyncio.Queue[BatchResult[P, R] | Exception | None] = asyncio.Queue()

    async def results(self) -> AsyncGenerator[BatchResult[P, R], None]:
        """The result of each prompt, once."""
        self._report = reporter(self._options.progress)
        self._tally = Tally(self._total, time.monotonic())
        workers = [asyncio.create_task(self._work()) for _ in range(self._options.concurrency)]
        try:
            self._report(self._tally.snapshot(time.monotonic()))
            waiting: dict[int, BatchResult[P, R]] = {}
            next_index = 0
            async for result in self._as_done():
                waiting[result.index] = result
                if not self._options.ordered:
                    next_index = result.index
                while next_index in waiting:
                    yield waiting.pop(next_index)
                    self._places.release()
                    next_index += 1
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            self._report(None)

    async def _as_done(self) -> AsyncIterator[BatchResult[P, R]]:
        num_working = self._options.concurrency
        while num_working:
            match await self._done.get():
                case None:
                    num_working -= 1
                case Exception() as error:
                    raise error
                case result:
                    yield result

    async def _work(self) -> None:
        try:
            while True:
                await self._places.acquire()
                try:
                    index, prompt = next(self._prompts)
                except StopIteration:
                    break
                result = await self._result(index, prompt)
                usage = result.answer.usage if result.answer else None
                self._tally.add(result.error is not None, usage)
                self._report(self._tally.snapshot(time.monotonic()))
                self._done.put_nowait(result)
        except Exception as error:
            self._done.put_nowait(error)
        else:
            # The place is given back so that another worker finds out, too, that there are no more prompts.
            self._places.release()
            self._done.put_nowait(None)

    async def _result(self, index: int, prompt: P) -> BatchResult[P, R]:
        tries = Tries()
        for num_attempts in itertools.count(1):
            try:
                answer = await self._ask(prompt)
                return BatchResult(index, prompt, answer, None, num_attempts)
            except PenstockError as error:
                delay_s = self._patience.delay_s(tries, error, time.monotonic(), random.random())
                if delay_s is None:
                    return BatchResult(index, prompt, None, error, num_attempts)
            self._tally.num_retries += 1
            self._report(self._tally.snapshot(time.monotonic()))
            await self._session.sleep(delay_s)
        raise AssertionError("count() has no end")

    async def _ask(self, prompt: P) -> R:
        """One attempt at a prompt."""
        session, requests = self._session, self._requests
        # The batch has more patience than a single request; its own retries are enough.
        once = RetryPolicy(max_retries=0)
        request = requests.of(prompt, requests.params, stream=requests.can_stream)
        if not requests.can_stream:
            answer = requests.answer_format.parse(await session.send(request, once))
            self._patience.answered()
            return answer
        async with AsyncStream(session, request, requests.answer_format, once) as stream:
            self._patience.answered()
            return await stream.result()
