# Made from _async/streams.py by make_sync.py; edit that.
"""The streams that `stream_complete` and `stream_chat` return. This file knows no HTTP library."""

from __future__ import annotations

from collections.abc import Iterator

from penstock_client._sync.session import Session
from penstock_client._sync.transport import StreamReply
from penstock_client.assembler import AnswerFormat, C, R, StreamAssembler, StreamedAnswer
from penstock_client.errors import PenstockError
from penstock_client.exchange import Request
from penstock_client.retries import Attempts, RetryPolicy


class Stream(StreamedAnswer[C, R], Iterator[C]):
    """An iterator of chunks, and the answer so far. The request is sent by `with`, or else by the first
    `next`.

    Leaving the `with` early closes the connection, and the server stops. Before the first chunk a
    stream raises, and retries, as `complete` does. Later it raises StreamError, StreamInterrupted or
    Timeout; the chunks until then remain valid.
    """

    def __init__(
        self,
        session: Session,
        request: Request,
        answer_format: AnswerFormat[C, R],
        policy: RetryPolicy | None = None,
    ) -> None:
        super().__init__(StreamAssembler(answer_format))
        self._session = session
        self._request = request
        self._attempts = Attempts(policy or session.policy)
        self._reply: StreamReply | None = None
        #: The chunks that the last block completed.
        self._chunks: Iterator[C] = iter(())
        #: Whether no more chunks come.
        self._is_closed = False

    def __enter__(self) -> Stream[C, R]:
        self._open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __iter__(self) -> Stream[C, R]:
        return self

    def __next__(self) -> C:
        while not self._is_closed:
            reply = self._open()
            try:
                chunk = self._next_chunk(reply)
            except PenstockError as error:
                reply.close()
                if self._assembler.has_begun or not self._session.wait_to_retry(self._attempts, error):
                    self._is_closed = True
                    raise
                self._reply = None
                continue
            if chunk is not None:
                return chunk
            self._is_closed = True
        raise StopIteration

    def result(self) -> R:
        """Read to the end; the whole answer, as `complete` or `chat` would have given it.

        Raises StreamInterrupted if the stream was left before its end.
        """
        for _ in self:
            pass
        return self._assembler.result()

    def close(self) -> None:
        """Close the connection. No more chunks come."""
        self._is_closed = True
        if self._reply is not None:
            self._reply.close()

    def _open(self) -> StreamReply:
        if self._reply is None:
            self._reply = self._session.open(self._request, self._attempts)
            self._assembler.begin(self._reply.request_id)
        return self._reply

    def _next_chunk(self, reply: StreamReply) -> C | None:
        """The next chunk; None at the end. The body is read to its end, so that the connection can be used
        again."""
        while (chunk := next(self._chunks, None)) is None:
            try:
                block = reply.next_block()
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
