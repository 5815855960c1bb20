"""A real HTTP server on a loopback port that answers by a script and misbehaves on request."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

#: Seconds. Only bounds the wait of a test that fails.
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Received:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Answer:
    """A complete answer."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def json(cls, value: object, status: int = 200, **headers: str) -> Answer:
        names = {name.replace("_", "-"): text for name, text in headers.items()}
        return cls(json.dumps(value).encode(), status, {"content-type": "application/json", **names})

    @classmethod
    def error(cls, status: int, message: str = "no", **headers: str) -> Answer:
        return cls.json({"error": {"message": message}}, status, **headers)


@dataclass(frozen=True)
class Events:
    """An event stream, written block by block, and how it ends.

    "end": as HTTP wants. "cut": the connection closes in the middle of the body. "reset": the
    same, rudely, after the test has set `server.proceed`. "hold": nothing more comes until the
    client leaves, which sets `server.client_gone`. pause_s: after each block.
    """

    blocks: Sequence[bytes]
    ending: Literal["end", "cut", "reset", "hold"] = "end"
    pause_s: float = 0.0


@dataclass(frozen=True)
class Silence:
    """The request is read, but nothing is answered until the client leaves."""


@dataclass(frozen=True)
class Hangup:
    """The request is read, and the connection closed without a word."""


Script = Answer | Events | Silence | Hangup


class FakeServer:
    """Gives each request the next answer of `script`, or else what `fallback` says."""

    def __init__(self) -> None:
        self.script: deque[Script] = deque()
        self.fallback: Callable[[Received], Script] | None = None
        self.received: list[Received] = []
        self.num_connections = 0
        self.client_gone = threading.Event()
        self.proceed = threading.Event()
        self.failures: list[str] = []
        # Bound but not listening: connections are refused until `start`.
        self._http = _Server(("127.0.0.1", 0), _Handler, bind_and_activate=False)
        self._http.fake = self
        self._http.server_bind()
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def start(self) -> None:
        self._http.server_activate()
        serve = self._http.serve_forever
        self._thread = threading.Thread(target=serve, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._http.shutdown()
            self._thread.join(PATIENCE_S)
        self._http.server_close()
        assert not self.failures, self.failures

    def next_answer(self, received: Received) -> Script:
        self.received.append(received)
        if self.script:
            return self.script.popleft()
        if self.fallback is not None:
            return self.fallback(received)
        self.failures.append(f"no answer left for {received.method} {received.path}")
        return Answer.error(500, self.failures[-1])


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    # The default of 5 makes the kernel drop the sixth client that comes at once, for a second.
    request_queue_size = 128
    fake: FakeServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        import traceback

        self.fake.failures.append(traceback.format_exc())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body are written one after the other; the second would wait for an ACK.
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.fake.num_connections += 1

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            # A client that leaves early may do so rudely; that is its right.
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        length = int(self.headers.get("content-length", 0))
        content = self.rfile.read(length)
        if len(content) < length:
            self.close_connection = True  # the client left while it was asking
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = json.loads(content) if content else None
        match self.server.fake.next_answer(Received(self.command, self.path, headers, body)):
            case Answer() as answer:
                self._send_head(answer.status, {**answer.headers, "content-length": len(answer.body)})
                self.wfile.write(answer.body)
            case Events() as events:
                self._send_events(events)
            case Silence():
                self._wait_until_client_leaves()
            case Hangup():
                self.close_connection = True

    def _send_head(self, status: int, headers: dict[str, Any]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.send_header("x-request-id", f"req-{len(self.server.fake.received)}")
        self.end_headers()

    def _send_events(self, events: Events) -> None:
        content_type = "text/event-stream; charset=utf-8"
        self._send_head(200, {"content-type": content_type, "transfer-encoding": "chunked"})
        for block in events.blocks:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(block), block))
            time.sleep(events.pause_s)
        match events.ending:
            case "end":
                self.wfile.write(b"0\r\n\r\n")
            case "cut":
                self.close_connection = True
            case "reset":
                self.server.fake.proceed.wait(PATIENCE_S)
                # Lingering for zero seconds makes the kernel send RST instead of FIN.
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                os.close(self.connection.detach())
                self.close_connection = True
            case "hold":
                self._wait_until_client_leaves()

    def _wait_until_client_leaves(self) -> None:
        self.close_connection = True
        self.connection.settimeout(PATIENCE_S)
        try:
            is_gone = self.connection.recv(1) == b""
        except ConnectionError:
            is_gone = True
        if is_gone:
            self.server.fake.client_gone.set()
