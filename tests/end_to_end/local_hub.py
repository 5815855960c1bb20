"""A hub on this machine: the routes of the Hugging Face hub that fetching a model takes."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c0ffee" + "0" * 34


class LocalHub:
    """Repositories are the folders owner/name in `root`. Use it in a `with`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        #: (path, range) of each file that was sent.
        self.sent: list[tuple[str, str | None]] = []
        #: Bytes after which the next file's connection breaks.
        self.breaks_after: int | None = None
        #: Names of files whose bytes are not those of their checksum.
        self.corrupt: set[str] = set()
        #: Headers of answers about files, in place of the right ones; None leaves one out.
        self.headers: dict[str, str | None] = {}
        #: What is added to the JSON about a repository, and to that about its files.
        self.model: dict[str, Any] = {}
        self.tree: list[dict[str, Any]] = []
        #: (status, headers, body) of each answer, of a server that is no hub.
        self.portal: tuple[int, dict[str, str], bytes] | None = None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                hub.answer(self, has_body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, has_body=False)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> LocalHub:
        # The end of a server waits for its next look: by default, half a second.
        threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, has_body: bool) -> None:
        path = request.path.partition("?")[0]
        if self.portal is not None:
            status, headers, body = self.portal
            self._send(request, status, body, headers, has_body)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", path):
            self._tell_files(request, match[1])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+", path):
            self._tell_tree(request, match[1])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self._send_file(request, self.root / match[1] / match[2], has_body)
        else:
            self._send(request, 404, b"{}", {})

    def _tell_files(self, request: BaseHTTPRequestHandler, name: str) -> None:
        folder = self.root / name
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        siblings = [
            {"rfilename": str(path.relative_to(folder)), "size": path.stat().st_size} for path in files
        ]
        body = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
        is_there = folder.is_dir()
        self._send(request, 200 if is_there else 404, json.dumps(body | self.model).encode(), {})

    def _tell_tree(self, request: BaseHTTPRequestHandler, name: str) -> None:
        folder = self.root / name
        tree = [
            {"type": "file", "path": str(path.relative_to(folder)), "size": path.stat().st_size, "oid": "0"}
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        ]
        self._send(request, 200, json.dumps(tree + self.tree).encode(), {})

    def _send_file(self, request: BaseHTTPRequestHandler, path: Path, has_body: bool) -> None:
        if not path.is_file():
            self._send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        data = path.read_bytes()
        is_large = path.suffix == ".safetensors"
        checksum = hashlib.sha256(data) if is_large else hashlib.sha1(b"blob %d\0" % len(data) + data)
        headers = {"ETag": f'"{checksum.hexdigest()}"', "X-Repo-Commit": COMMIT}
        told = {name: text for name, text in (headers | self.headers).items() if text is not None}
        if path.name in self.corrupt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        begin = 0
        if has_body:
            asked = request.headers.get("Range")
            self.sent.append((path.name, asked))
            begin = int(re.sub(r"\D", "", asked)) if asked else 0
        self._send(request, 206 if begin else 200, data[begin:], told, has_body)

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: dict[str, str],
        has_body: bool = True,
    ) -> None:
        request.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            request.send_header(name, value)
        request.end_headers()
        if not has_body or request.command == "HEAD":
            return
        if self.breaks_after is not None and len(body) > self.breaks_after:
            body, self.breaks_after = body[: self.breaks_after], None
            request.close_connection = True
        request.wfile.write(body)
