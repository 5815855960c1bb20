"""`penstock batch`: answers a file of requests with the application of `penstock serve`, without a socket.

Twice as many requests are under way as a step has sequences: half of them are computed, half of them wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message
from tqdm import tqdm

from penstock.errors import ConfigError
from penstock_server.api.app import create_app
from penstock_server.commands.batch_files import (
    BatchOutput,
    BatchRequest,
    answer_line,
    check_ids,
    error_line,
    read_requests,
)
from penstock_server.facade.engine import ServedEngine
from penstock_server.settings.settings import Settings
from penstock_server.telemetry import logs

logger = logging.getLogger(__name__)

#: Seconds between two lines of progress, if stderr is no terminal.
_PROGRESS_INTERVAL_S = 10.0

#: The application's error code for a full queue. The batch sends such a request again later.
_OVERLOADED = "overloaded"


def run_batch(settings: Settings, source: Path, target: Path) -> int:
    """Answers the lines of `source` that `target` has no answer for. Returns 0 when each line has an answer
    or an error. Raises ConfigError for unusable files, and the error that kept the engine from loading or
    ended the engine."""
    logs.configure(settings.log_level, settings.log_format)
    logging.getLogger("penstock_server.middleware.request_context").setLevel(logging.WARNING)
    custom_ids = check_ids(source)
    with BatchOutput(target) as output:
        if strangers := sorted(output.custom_ids - custom_ids):
            raise ConfigError(
                f"{target} has an answer to {strangers[0]!r}, but {source} has no such request; name a new "
                "file for the output"
            )
        if num_done := len(output.custom_ids) + len(output.line_numbers):
            logger.info("%d lines are in %s already", num_done, target)
        batch = _Batch(_open_settings(settings), source, output)
        if batch.num_pending:
            asyncio.run(batch.run())
    return 0


def _open_settings(settings: Settings) -> Settings:
    """The settings without keys, limits and traces: a batch has no clients to guard against."""
    return replace(
        settings,
        api_key=(),
        api_key_file=None,
        rate_limit_requests=0,
        rate_limit_tokens=0,
        queue_timeout=0,
        request_timeout=0,
        otlp_traces_endpoint=None,
    )


class _Batch:
    def __init__(self, settings: Settings, source: Path, output: BatchOutput) -> None:
        self._settings = settings
        self._output = output
        self._source = source
        self._finished = asyncio.Event()
        self.num_pending = sum(1 for _ in self._pending())
        self._check_models()
        self._progress = _Progress(self.num_pending)

    def _pending(self) -> Iterator[BatchRequest]:
        """The requests that have no line in the output yet."""
        done = self._output.is_done
        return (request for request in read_requests(self._source) if not done(request))

    def _check_models(self) -> None:
        """Raises ConfigError if no request asks for this model: each of them would fail with the same
        error."""
        known = {self._settings.model, *self._settings.model_names, *self._settings.adapters}
        stranger = None
        for request in self._pending():
            name = request.body.get("model")
            if request.error is None and (not isinstance(name, str) or name in known):
                return
            stranger = stranger or name
        if stranger is not None:
            names = " or ".join(self._settings.model_names)
            raise ConfigError(
                f"{self._source} asks for the model {stranger!r} and never for {names}: add "
                f"--served-model-name {stranger}, or change the file"
            )

    async def run(self) -> None:
        engine = ServedEngine.of(self._settings)
        app = create_app(engine, self._settings)
        async with app.router.lifespan_context(app):
            await engine.wait_until_ready()
            width = min(2 * engine.loaded.max_num_seqs, engine.loaded.max_requests)
            pending = self._pending()
            try:
                async with asyncio.TaskGroup() as tasks:
                    watch = tasks.create_task(engine.wait_until_ended())  # if the engine dies, workers end
                    await asyncio.wait([tasks.create_task(self._work(app, pending)) for _ in range(width)])
                    watch.cancel()
            except ExceptionGroup as errors:
                raise _first(errors) from None
            finally:
                self._progress.close()

    async def _work(self, app: ASGIApp, pending: Iterator[BatchRequest]) -> None:
        """Answers one request after the other."""
        for request in pending:
            if request.error is not None:
                line = error_line(request)
            else:
                status, request_id, body = await self._ask(app, request)
                line = answer_line(request, status, request_id, body)
            self._output.append(line)
            self._finished.set()
            response = line["response"]
            self._progress.add(response["body"] if response and response["status_code"] == 200 else None)

    async def _ask(self, app: ASGIApp, request: BatchRequest) -> tuple[int, str, Any]:
        """The answer to a request. A request that finds the queue full is sent again when another has
        ended."""
        while True:
            self._finished.clear()
            status, request_id, body = await post(app, request.url, json.dumps(request.body).encode())
            code = body.get("error", {}).get("code") if status == 503 else None
            if code == _OVERLOADED:
                await self._finished.wait()
            elif code is not None:
                # The engine is ending. This request waits here; the task that watches the engine has the
                # error.
                await asyncio.Event().wait()
            else:
                return status, request_id, body


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    """One of the errors of several tasks: all tasks stop for the same reason."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, str, Any]:
    """Status, request id and JSON body of the application's answer."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # this client never leaves
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
        "client": ("batch", 0),
        "server": ("batch", 0),
    }
    await app(scope, receive, send)
    headers = dict(sent[0]["headers"])
    content = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], headers[b"x-request-id"].decode(), json.loads(content)


class _Progress:
    """Progress on stderr: a bar in a terminal, elsewhere a line now and then."""

    def __init__(self, num_lines: int) -> None:
        self._num_lines = num_lines
        self._num_done = self._num_failed = self._num_tokens = 0
        self._start = self._told = time.monotonic()
        self._bar: Any = tqdm(total=num_lines, unit="line") if sys.stderr.isatty() else None

    def add(self, answer: dict[str, Any] | None) -> None:
        """answer: the body of the answer; None for an error."""
        self._num_done += 1
        self._num_failed += answer is None
        self._num_tokens += ((answer or {}).get("usage") or {}).get("completion_tokens", 0)
        if self._bar is not None:
            self._bar.set_postfix_str(
                f"{self._num_failed} failed, {self._rate():.1f} tokens/s", refresh=False
            )
            self._bar.update()
        elif time.monotonic() - self._told > _PROGRESS_INTERVAL_S:
            self._tell()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._tell()

    def _rate(self) -> float:
        return self._num_tokens / max(time.monotonic() - self._start, 1e-9)

    def _tell(self) -> None:
        self._told = time.monotonic()
        logger.info(
            "%d of %d lines answered, %d of them with an error; %.1f tokens/s",
            *(self._num_done, self._num_lines, self._num_failed, self._rate()),
        )
