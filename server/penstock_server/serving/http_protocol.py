"""uvicorn's HTTP connections, with limits for the time and size of a request's head, and for the number of a
body's chunks."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.auto import AutoHTTPProtocol

# uvicorn has two protocols and takes one by what is installed; both have the same methods.
_Protocol: Any = AutoHTTPProtocol

#: The most bytes of a request's first line and headers. Other servers take 8 to 64 KiB.
MAX_HEAD_BYTES = 1 << 16
#: A body may come in so many chunks of any size, and in one more for each CHUNK_BYTES: a chunk takes ten
#: microseconds on the event loop, even if it has a single byte.
MAX_SMALL_CHUNKS, CHUNK_BYTES = 4096, 256
_TOO_MANY_CHUNKS = (
    f"The request's body comes in too many chunks: after the first {MAX_SMALL_CHUNKS}, chunks must have "
    f"{CHUNK_BYTES} bytes on average. Send larger chunks, or the body as a whole."
)
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class ChunkCount:
    """The chunks of one body."""

    def __init__(self) -> None:
        self.num_chunks = self.num_bytes = 0

    @property
    def is_too_many(self) -> bool:
        return self.num_chunks > MAX_SMALL_CHUNKS + self.num_bytes // CHUNK_BYTES


class _Connection(h11.Connection):
    """h11's, for a server, which refuses bodies in too many chunks."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.chunks = ChunkCount()

    def next_event(self) -> Any:
        """Raises RemoteProtocolError, as h11's own."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.chunks = ChunkCount()
        elif isinstance(event, h11.Data):
            self.chunks.num_chunks += event.chunk_start
            self.chunks.num_bytes += len(event.data)
            if self.chunks.is_too_many:
                raise h11.RemoteProtocolError(_TOO_MANY_CHUNKS)
        return event


def http_protocol(head_timeout_s: float) -> type[asyncio.Protocol]:
    """A protocol that closes a connection if no complete head of a request has come `head_timeout_s` after
    the connection began or after the last answer (0 is no limit), or if a head is larger than MAX_HEAD_BYTES.
    (uvicorn itself closes only connections that are silent after an answer, and httptools collects a head
    without end.)"""

    class HTTPProtocol(_Protocol):  # type: ignore[misc]
        _timer: asyncio.TimerHandle | None = None
        _num_head_bytes = 0
        _has_head = False  # with httptools alone

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if hasattr(self, "conn"):  # h11's
                self.conn = _Connection()
            else:
                self._chunks = ChunkCount()

        def data_received(self, data: bytes) -> None:
            was_in_head = self._is_in_head
            self._num_head_bytes += len(data)
            super().data_received(data)
            if not (was_in_head and self._is_in_head):
                self._num_head_bytes = 0
            if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                if self._expects_head:  # otherwise an answer is under way, and this would be in its middle
                    self.transport.write(_TOO_LARGE)
                self.transport.close()

        def on_headers_complete(self) -> None:
            """Called by httptools."""
            super().on_headers_complete()
            self._has_head = True
            self._chunks = ChunkCount()

        def on_chunk_header(self) -> None:
            """Called by httptools, which takes an error here for one of the request."""
            self._chunks.num_chunks += 1
            if self._chunks.is_too_many:
                raise ValueError(_TOO_MANY_CHUNKS)

        def on_body(self, body: bytes) -> None:
            """Called by httptools."""
            self._chunks.num_bytes += len(body)
            super().on_body(body)

        def send_400_response(self, msg: str) -> None:
            """uvicorn's answer to what is no request."""
            if not self._may_answer:
                self.transport.close()
            elif self._counted.is_too_many:
                super().send_400_response(_TOO_MANY_CHUNKS)
            else:
                super().send_400_response(msg)

        def on_message_complete(self) -> None:
            """Called by httptools."""
            super().on_message_complete()
            self._has_head = False
            self._num_head_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._expect_request()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._expect_request()

        def connection_lost(self, error: Exception | None) -> None:
            super().connection_lost(error)
            self._forget_timer()

        def _expect_request(self) -> None:
            self._forget_timer()
            if head_timeout_s and not self.transport.is_closing():
                self._timer = self.loop.call_later(head_timeout_s, self._end_if_idle)

        def _forget_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()

        @property
        def _may_answer(self) -> bool:
            """Whether the request that comes has no answer yet, and none is under way."""
            if hasattr(self, "conn"):
                return self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE)
            if self.cycle is None or not self.cycle.response_started:
                return True
            return bool(self.cycle.response_complete) and not self._has_head

        @property
        def _counted(self) -> ChunkCount:
            counted: ChunkCount = self.conn.chunks if hasattr(self, "conn") else self._chunks
            return counted

        @property
        def _is_in_head(self) -> bool:
            """Whether what comes next is a head's. The answer may be there before the request's body is: the
            rest of that body is no head."""
            if hasattr(self, "conn"):  # h11's state
                return bool(self.conn.their_state is h11.IDLE)
            return not self._has_head

        @property
        def _expects_head(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _end_if_idle(self) -> None:
            if self._expects_head:
                self.transport.close()

    return HTTPProtocol
