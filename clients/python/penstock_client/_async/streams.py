"""The streams that `stream_complete` and `stream_chat` return. This file knows no HTTP library."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from penstock_client._async.session import AsyncSession
from penstock_client._async.transport import AsyncStreamReply
from penstock_client.assembler import AnswerFormat, C, R, StreamAssembler, StreamedAnswer
from penstock_client.errors import PenstockError
from penstock_client.exchange import Request
from penstock_client.retries import Attempts, RetryPolicy


class AsyncStream(StreamedAnswer[C, R], AsyncIterator[C]):
    """An iterator of chunks, and the answer so far. The request is sent by `with`, or else by the first
    `next`.

    Leaving the `with` early closes the connection, and the server stops. Before the first chunk a
    stream raises, and retries, as `complete` does. Later it raises StreamError, StreamInterrupted or
    Timeout; the chunks until then remain valid.
    """

    def __init__(
        self,
        session: AsyncSession,
        request: Request,
        answer_format: AnswerFormat[C, R],
        policy: RetryPolicy | None = None,
    ) -> None:
        super().__init__(StreamAssembler(answer_format))
        self._session = session
        self._request = request
        self._attempts = Attempts(policy or session.policy)
        self._reply: AsyncStreamReply | None = None
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
                if self._assembler.has_begun or not await self._session.wait_to_retry(self._attempts, error):
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

    async def _open(self) -> AsyncStreamReply:
        if self._reply is None:
            self._reply = await self._session.open(self._request, self._attempts)
            self._assembler.begin(self._reply.request_id)
        return self._reply

    async def _next_chunk(self, reply: AsyncStreamReply) -> C | None:
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
