"""The streams that `stream_complete` and `stream_chat` return. This file knows no HTTP library."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Generic, Protocol

from penstock_client.assembler import C, R, StreamAssembler
from penstock_client.at_once import at_once
from penstock_client.errors import PenstockError
from penstock_client.results import ToolCall, Usage


class OpenReply(Protocol):
    """An answer whose body is still coming. Close it, also after an error."""

    request_id: str | None

    async def next_block(self) -> bytes | None:
        """The next bytes; None at the end, when the connection is released."""
        ...

    async def aclose(self) -> None: ...


class StreamedAnswer(Generic[C, R]):
    """The answer of a stream so far; after the last chunk, the whole answer."""

    def __init__(self, assembler: StreamAssembler[C, R]) -> None:
        self._assembler = assembler

    @property
    def text(self) -> str:
        """The text of choice 0."""
        return self._assembler.text

    @property
    def finish_reason(self) -> str | None:
        """Why choice 0 ended; None: it has not."""
        return self._assembler.finish_reason

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of choice 0. Their arguments may be incomplete until the stream ends."""
        return self._assembler.tool_calls

    @property
    def usage(self) -> Usage | None:
        """The counts of tokens, which come with the last chunk."""
        return self._assembler.usage

    @property
    def request_id(self) -> str | None:
        """The server's name for the request, known once the stream is open."""
        return self._assembler.request_id


class AsyncStream(StreamedAnswer[C, R], AsyncIterator[C]):
    """Stream for asyncio: `async with client.stream_chat(...) as stream`, `async for`."""

    def __init__(
        self,
        open_reply: Callable[[], Awaitable[OpenReply]],
        assembler: StreamAssembler[C, R],
        wait_to_retry: Callable[[PenstockError], Awaitable[bool]],
    ) -> None:
        """wait_to_retry: waits, and returns whether to try again after the error."""
        super().__init__(assembler)
        self._open_reply = open_reply
        self._wait_to_retry = wait_to_retry
        self._reply: OpenReply | None = None
        #: The chunks that the last block completed.
        self._chunks: Iterator[C] = iter(())
        #: Whether no more chunks come.
        self._is_closed = False

    async def __aenter__(self) -> AsyncStream[C, R]:
        await self._open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncStream[C, R]:
        return self

    async def __anext__(self) -> C:
        while not self._is_closed:
            reply = await self._open()
            try:
                chunk = await self._next_chunk(reply)
            except PenstockError as error:
                await reply.aclose()
                if self._assembler.has_begun or not await self._wait_to_retry(error):
                    self._is_closed = True
                    raise
                self._reply = None
                continue
            if chunk is not None:
                return chunk
            self._is_closed = True
        raise StopAsyncIteration

    async def result(self) -> R:
        """Read to the end; the whole answer, as `complete` or `chat` would have given it.

        Raises StreamInterrupted if the stream was left before its end.
        """
        async for _ in self:
            pass
        return self._assembler.result()

    async def aclose(self) -> None:
        """Close the connection. No more chunks come."""
        self._is_closed = True
        if self._reply is not None:
            await self._reply.aclose()

    async def _open(self) -> OpenReply:
        if self._reply is None:
            self._reply = await self._open_reply()
            self._assembler.begin(self._reply.request_id)
        return self._reply

    async def _next_chunk(self, reply: OpenReply) -> C | None:
        """The next chunk; None at the end. The body is read to its end, so that the connection can be used
        again."""
        while (chunk := next(self._chunks, None)) is None:
            try:
                block = await reply.next_block()
            except PenstockError:
                # After [DONE] the answer is complete, so that an error of the connection does not matter.
                if not self._assembler.is_done:
                    raise
                block = None
            if block is None:
                self._assembler.finish()
                return None
            self._chunks = self._assembler.feed(block)
        return chunk


class Stream(StreamedAnswer[C, R], Iterator[C]):
    """An iterator of chunks. The request is sent by `with`, or else by the first `next`.

    Leaving the `with` early closes the connection, and the server stops. Before the first chunk a
    stream raises, and retries, as `complete` does. Later it raises StreamError, StreamInterrupted or
    Timeout; the chunks until then remain valid.
    """

    def __init__(self, stream: AsyncStream[C, R]) -> None:
        """stream: a stream that never waits for an event loop."""
        super().__init__(stream._assembler)
        self._stream = stream

    def __enter__(self) -> Stream[C, R]:
        at_once(self._stream.__aenter__())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __iter__(self) -> Stream[C, R]:
        return self

    def __next__(self) -> C:
        try:
            return at_once(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def result(self) -> R:
        """Read to the end; the whole answer, as `complete` or `chat` would have given it.

        Raises StreamInterrupted if the stream was left before its end.
        """
        return at_once(self._stream.result())

    def close(self) -> None:
        """Close the connection. No more chunks come."""
        at_once(self._stream.aclose())
