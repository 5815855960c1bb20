"""RequestContext: the outermost layer, except for ErrorForms and PathForm. Each request gets an id, an answer
whatever goes wrong, and at its end a log line and a count."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock_server.protocol.errors import CLIENT_CLOSED_REQUEST, api_error
from penstock_server.protocol.paths import is_operational
from penstock_server.telemetry.http_metrics import HttpMetrics
from penstock_server.telemetry.request_info import RequestInfo, TimeLimits, current_request
from penstock_server.telemetry.tracing import RequestTracer

logger = logging.getLogger(__name__)

#: The header that names what an answer leaves out of account.
IGNORED_HEADER = "X-Penstock-Ignored"
#: The most characters of that header and of its line in the log.
_MAX_IGNORED_CHARS = 1000


class RequestContext:
    def __init__(
        self, app: ASGIApp, metrics: HttpMetrics, tracer: RequestTracer | None, limits: TimeLimits
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._tracer = tracer
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id", ""))
        info = RequestInfo(request_id, _address(scope), self._limits)
        scope.setdefault("state", {})["request_id"] = info.request_id
        token = current_request.set(info)
        status = 0

        async def receive_counted() -> Message:
            message = await receive()
            info.num_body_bytes += len(message.get("body", b""))
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = info.request_id
                if info.ignored:
                    headers[IGNORED_HEADER] = _shown(info.ignored)
            await send(message)

        try:
            await self._app(scope, receive_counted, send_with_id)
        except ClientDisconnect:
            status = CLIENT_CLOSED_REQUEST
        except Exception as error:
            if status:  # the answer has begun, so that no error can be sent
                raise
            await api_error(error).response()(scope, receive, send_with_id)
        finally:
            info.end()
            duration_s = time.monotonic() - info.arrival
            self._metrics.observe(scope, status, duration_s)
            _log(scope, status, duration_s, info)
            if self._tracer is not None and not is_operational(scope["path"]):
                self._tracer.record(scope, status, duration_s, info)
            current_request.reset(token)


def _request_id(given: str) -> str:
    """The client's own id if it may stand in a header and in a log line, else a new id."""
    return given if re.fullmatch(r"[\w.:/+=-]{1,128}", given, re.ASCII) else uuid.uuid4().hex


def _shown(ignored: list[str]) -> str:
    """The places in one line of ASCII: the names in them are the client's."""
    line = ", ".join(ignored).encode("ascii", "backslashreplace").decode()
    return re.sub(r"[^ -~]", "?", line)[:_MAX_IGNORED_CHARS]


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""


def _log(scope: Scope, status: int, duration_s: float, info: RequestInfo) -> None:
    """Logs a line per request, for probes and scrapers at level debug. Prompts and answers are never
    logged."""
    level = logging.DEBUG if is_operational(scope["path"]) else logging.INFO
    path, timings = repr(scope["path"])[1:-1], info.timings()
    extra = {"method": scope["method"], "path": path, "status": status, "seconds": round(duration_s, 4)}
    shown = "".join(f", {name} {value}" for name, value in timings.items())
    if info.model is not None:
        extra["model"] = info.model
        shown = f", model {info.model}{shown}"
    if info.ignored:
        extra["ignored"] = _shown(info.ignored)
        shown += f", ignored: {extra['ignored']}"
    logger.log(
        level,
        "%s %s %d %.3f s%s",
        *(scope["method"], path, status, duration_s, shown),
        extra=extra | timings,
    )
