"""The streams that `stream_complete` and `stream_chat` return. Knows no HTTP library."""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
)
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Generic

from penstock_client.assembler import C, R, StreamAssembler
from penstock_client.errors import PenstockError
from penstock_client.results import ToolCall, Usage

if TYPE_CHECKING:
    # Only for their names: this file would work with any transport.
    from penstock_client.transport import AsyncStreamReply, StreamReply


class StreamedAnswer(Generic[C, R]):
    """What a stream has brought so far; after its last chunk, the whole answer."""

    def __init__(self, assembler: StreamAssembler[C, R]) -> None:
        self._assembler = assembler
        self._is_closed = False

    @property
    def text(self) -> str:
        """The text of choice 0."""
        return self._assembler.text

    @property
    def finish_reason(self) -> str | None:
        """Why choice 0 ended; None as long as it has not."""
        return self._assembler.finish_reason

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """What choice 0 wants called; arguments may be incomplete until the stream ends."""
        return self._assembler.tool_calls

    @property
    def usage(self) -> Usage | None:
        """Counts of tokens, which the server sends last."""
        return self._assembler.usage

    @property
    def request_id(self) -> str | None:
        """The server's name for the request, known once the stream is open."""
        return self._assembler.request_id


class Stream(StreamedAnswer[C, R], Iterator[C]):
    """An iterator of chunks. The request is sent by `with`, or else by the first `next`.

    Leaving the `with` early closes the connection, by which the server learns to stop.
    Raises what `complete` raises until the stream has begun, then StreamError,
    StreamInterrupted or Timeout; the chunks until then remain valid. As long as no chunk came,
    what may be tried again is, as for `complete`.
    """

    def __init__(
        self,
        open_reply: Callable[[], StreamReply],
        assembler: StreamAssembler[C, R],
        wait_to_retry: Callable[[PenstockError], bool],
    ) -> None:
        """wait_to_retry: waits and says whether to try again after an error."""
        super().__init__(assembler)
        self._open_reply = open_reply
        self._wait_to_retry = wait_to_retry
        self._reply: StreamReply | None = None
        self._chunks: Iterator[C] = iter(())

    def __enter__(self) -> Stream[C, R]:
        self._open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __iter__(self) -> Stream[C, R]:
        return self

    def __next__(self) -> C:
        while True:
            self._open()
            try:
                return next(self._chunks)
            except PenstockError as error:
                if self._assembler.has_begun or not self._wait_to_retry(error):
                    raise
                self._reply = None

    def result(self) -> R:
        """Read to the end; the whole answer, as `complete` or `chat` would have given it.

        Raises StreamInterrupted if the stream was left before its end.
        """
        for _ in self:
            pass
        return self._assembler.result()

    def close(self) -> None:
        """Close the connection. The chunks end here."""
        self._is_closed = True
        self._chunks = iter(())
        if self._reply is not None:
            self._reply.close()

    def _open(self) -> None:
        if self._reply is None and not self._is_closed:
            self._reply = self._open_reply()
            self._assembler.begin(self._reply.request_id)
            self._chunks = _chunks(self._reply, self._assembler)


class AsyncStream(StreamedAnswer[C, R], AsyncIterator[C]):
    """The same for asyncio: `async with client.stream_chat(...) as stream`, `async for`."""

    def __init__(
        self,
        open_reply: Callable[[], Awaitable[AsyncStreamReply]],
        assembler: StreamAssembler[C, R],
        wait_to_retry: Callable[[PenstockError], Awaitable[bool]],
    ) -> None:
        super().__init__(assembler)
        self._open_reply = open_reply
        self._wait_to_retry = wait_to_retry
        self._reply: AsyncStreamReply | None = None
        self._chunks: AsyncGenerator[C, None] | None = None

    async def __aenter__(self) -> AsyncStream[C, R]:
        await self._open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncStream[C, R]:
        return self

    async def __anext__(self) -> C:
        while True:
            await self._open()
            if self._chunks is None:
                raise StopAsyncIteration
            try:
                return await anext(self._chunks)
            except PenstockError as error:
                if self._assembler.has_begun or not await self._wait_to_retry(error):
                    raise
                self._reply = None

    async def result(self) -> R:
        """Read to the end; the whole answer, as `complete` or `chat` would have given it.

        Raises StreamInterrupted if the stream was left before its end.
        """
        async for _ in self:
            pass
        return self._assembler.result()

    async def aclose(self) -> None:
        """Close the connection. The chunks end here."""
        self._is_closed = True
        chunks, self._chunks = self._chunks, None
        if chunks is not None:
            await chunks.aclose()
        if self._reply is not None:
            await self._reply.aclose()

    async def _open(self) -> None:
        if self._reply is None and not self._is_closed:
            self._reply = await self._open_reply()
            self._assembler.begin(self._reply.request_id)
            self._chunks = _async_chunks(self._reply, self._assembler)


# Functions rather than methods: a generator that held its stream would form a cycle with it, and
# a stream that is simply dropped would keep its connection until the garbage collector runs.
def _chunks(reply: StreamReply, assembler: StreamAssembler[C, R]) -> Generator[C, None, None]:
    with closing(reply):
        try:
            # Read on after [DONE], to the end of the body: the connection can then be used again.
            for block in reply.blocks():
                yield from assembler.feed(block)
        except PenstockError:
            # Once [DONE] came, the answer is whole, whatever becomes of the connection.
            if not assembler.is_done:
                raise
    assembler.finish()


async def _async_chunks(reply: AsyncStreamReply, assembler: StreamAssembler[C, R]) -> AsyncGenerator[C, None]:
    async with aclosing(reply), aclosing(reply.blocks()) as blocks:
        try:
            async for block in blocks:
                for chunk in assembler.feed(block):
                    yield chunk
        except PenstockError:
            if not assembler.is_done:
                raise
    assembler.finish()
