"""Channel: one TCP connection, with or without TLS, that one thread reads while another writes."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable

from penstock.nodes.wire.frames import MAX_FIELDS_BYTES, Frame, read_frame


class Channel:
    """Frames over a connected socket. Every wait ends after `timeout_s` without a byte, with TimeoutError."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._socket = connection
        self._timeout_s = timeout_s
        #: When all waits end, whatever comes until then, by time.monotonic().
        self.ends_at = math.inf
        #: OpenSSL takes one call at a time. No call waits, so nobody holds the lock for long.
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # a test's socket pair is no TCP connection
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.bytes_sent = self.bytes_received = 0

    @property
    def address(self) -> str:
        """Of the other side."""
        try:
            name = self._socket.getpeername()
        except OSError:
            return "?"
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(name)

    def send(self, frame: Frame) -> None:
        """Raises OSError."""
        parts = frame.parts()
        if len(parts) > 1 and sum(len(part) for part in parts) < 1 << 16:
            parts = [b"".join(parts)]
        with self._sending:
            for part in parts:
                self._send_all(memoryview(part))

    def receive(self, limit: Callable[[], int] = lambda: 0, max_fields: int = MAX_FIELDS_BYTES) -> Frame:
        """The next frame, with at most limit() bytes of arrays. Raises OSError."""
        return read_frame(self._read_into, limit, max_fields)

    def close(self) -> None:
        """Whoever waits here gets an OSError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._socket.close()

    def _send_all(self, view: memoryview) -> None:
        deadline = self._deadline()
        while len(view):
            wants = select.POLLOUT
            try:
                with self._lock:
                    sent = self._socket.send(view)
                self.bytes_sent += sent
                view = view[sent:]
                deadline = self._deadline()
                continue
            except (BlockingIOError, ssl.SSLWantWriteError):
                pass
            except ssl.SSLWantReadError:  # the reading thread brings what TLS waits for
                wants = select.POLLIN
            self._wait(wants, deadline)

    def _read_into(self, view: memoryview) -> None:
        deadline = self._deadline()
        while len(view):
            try:
                with self._lock:
                    count = self._socket.recv_into(view)
                if not count:
                    raise ConnectionResetError("the other side has closed the connection")
                self.bytes_received += count
                view = view[count:]
                deadline = self._deadline()
                continue
            except (BlockingIOError, ssl.SSLWantReadError):
                pass
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, deadline)
                continue
            self._wait(select.POLLIN, deadline)

    def _deadline(self) -> float:
        return min(time.monotonic() + self._timeout_s, self.ends_at)

    def _wait(self, wants: int, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        file = self._socket.fileno()
        if file < 0:
            raise ConnectionAbortedError("the connection was closed here")
        if left_s <= 0:
            raise TimeoutError(f"nothing came for {self._timeout_s:g} s")
        poller = select.poll()
        poller.register(file, wants)
        poller.poll(1000 * min(left_s, 0.5))  # a socket that this side closes wakes nobody on some systems
