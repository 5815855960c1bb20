"""The files of `penstock batch` in OpenAI's format: one request in each line, one answer in each line.

Each line of the output is complete. A kill may leave half a line at the end; the next run cuts it off. So a
request that has a line in the output is done, and no later run repeats the request.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.errors import CapacityError, ConfigError

#: Seconds between two flushes to the disk. A power cut loses the answers of this time; a kill loses none.
_SYNC_INTERVAL_S = 1.0

#: The beginning of each line of the output.
_BEGIN = b'{"id": "batch_req_'

#: The number of duplicates that an error names.
_MAX_NAMED = 5


@dataclass(frozen=True)
class BatchRequest:
    """A line of the input. `error` says why the line is no usable request; None: the line is usable."""

    number: int
    custom_id: str | None = None
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def parse_line(number: int, line: bytes) -> BatchRequest:
    """The request in a line of the input. number: the line's number, counted from 1."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BatchRequest(number, error=f"line {number} is not JSON: {error}")
    if not isinstance(entry, dict):
        return BatchRequest(number, error=f"line {number} is not a JSON object")
    custom_id, url, body = (entry.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        return BatchRequest(number, error=f"line {number} has no custom_id, which must be a string")
    problem = None
    if entry.get("method") != "POST":
        problem = f"method is {entry.get('method')!r}; it must be 'POST'"
    elif not isinstance(url, str) or not url.startswith("/v1/") or not url.isascii():
        problem = f"url is {url!r}; it must be a path such as '/v1/chat/completions'"
    elif not isinstance(body, dict):
        problem = "body must be a JSON object: the request"
    elif body.get("stream"):
        problem = "body has stream, which is not possible in a batch"
    if problem is not None or not isinstance(url, str) or not isinstance(body, dict):
        return BatchRequest(number, custom_id, error=f"line {number}: {problem}")
    # The router would redirect a path with a slash too many, and nobody here follows a redirect.
    return BatchRequest(number, custom_id, url.rstrip("/"), body)


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """The requests of a file, empty lines skipped. Raises ConfigError if the file can't be read, or if it is
    a pipe: a batch reads its input several times."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a file that can be read several times; name a file of requests")
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield parse_line(number, line)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None


def check_ids(path: Path) -> set[str]:
    """The custom_ids of the input. Raises ConfigError if two lines have the same one."""
    lines: dict[str, int] = {}
    twice = []
    for request in read_requests(path):
        if request.custom_id is None:
            continue
        if request.custom_id in lines:
            twice.append(f"{request.custom_id!r} in lines {lines[request.custom_id]} and {request.number}")
        lines.setdefault(request.custom_id, request.number)
    if twice:
        more = f" and {len(twice) - _MAX_NAMED} more" if len(twice) > _MAX_NAMED else ""
        raise ConfigError(
            f"{path}: a custom_id may stand in one line only; {', '.join(twice[:_MAX_NAMED])}{more}"
        )
    return set(lines)


def answer_line(request: BatchRequest, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """The output line for an answer of the server, be it a success or an error."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _line(request, response, None)


def error_line(request: BatchRequest) -> dict[str, Any]:
    """The output line for an input line that is no usable request."""
    error = {"code": "invalid_line", "message": request.error, "line": request.number}
    return _line(request, None, error)


def _line(request: BatchRequest, response: Any, error: Any) -> dict[str, Any]:
    line_id = f"batch_req_{uuid.uuid4().hex}"
    return {"id": line_id, "custom_id": request.custom_id, "response": response, "error": error}


class BatchOutput:
    """The output file, open for more lines. One process at a time holds the file, by a lock."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file can't be written, is in use, or holds something else."""
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise ConfigError(f"{path} is not a file that can be read again; name a file for the output")
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            #: The requests that are done: their custom_ids, and the numbers of lines without a custom_id.
            self.custom_ids: set[str] = set()
            self.line_numbers: set[int] = set()
            self._read()
        except BaseException as error:
            os.close(self._fd)
            if isinstance(error, BlockingIOError):
                raise ConfigError(f"{path} is being written by another batch") from None
            raise
        self._synced = time.monotonic()

    def _read(self) -> None:
        """Notes which requests are done, and cuts off half a line of an answer at the end of the file."""
        end = 0
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            for line in file:
                if line.endswith(b"\n"):
                    self._note(line)
                    end += len(line)
                elif not (line.startswith(_BEGIN) or _BEGIN.startswith(line)):
                    raise self._is_no_output()
        os.ftruncate(self._fd, end)

    def _note(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            _ = entry["response"]  # a request has a custom_id too, but no response
            if entry["custom_id"] is None:
                self.line_numbers.add(entry["error"]["line"])
            else:
                self.custom_ids.add(entry["custom_id"])
        except (ValueError, TypeError, KeyError):
            raise self._is_no_output() from None

    def _is_no_output(self) -> ConfigError:
        return ConfigError(
            f"{self._path} has a line that is no answer of a batch; name a new file for the output"
        )

    def is_done(self, request: BatchRequest) -> bool:
        if request.custom_id is None:
            return request.number in self.line_numbers
        return request.custom_id in self.custom_ids

    def append(self, line: dict[str, Any]) -> None:
        """Writes a line. Raises CapacityError if the disk is full, or gone."""
        data = memoryview(json.dumps(line).encode() + b"\n")
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            if time.monotonic() - self._synced > _SYNC_INTERVAL_S:
                os.fsync(self._fd)
                self._synced = time.monotonic()
        except OSError as error:
            raise CapacityError(
                f"cannot write {self._path}: {error.strerror or error}. Make room on the disk and repeat the "
                "command: the batch goes on where it stopped"
            ) from None

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.fsync(self._fd)
        os.close(self._fd)
