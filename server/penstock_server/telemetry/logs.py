"""The form of log lines, text or JSON, and the one handler on stderr for our lines and uvicorn's.

A line about a request has the request's id. No line has a prompt or an answer.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from penstock_server.telemetry.request_info import current_request

#: The attributes of every record; any other attribute came as `extra`.
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "request_id"}


def configure(level: str, log_format: str) -> None:
    """log_format: "text" or "json"."""
    handler = logging.StreamHandler()
    handler.addFilter(_add_request_id)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def _add_request_id(record: logging.LogRecord) -> bool:
    info = current_request.get()
    record.request_id = info.request_id if info else None
    return True


class TextFormatter(logging.Formatter):
    """2026-01-31 12:00:00,000 INFO penstock_server.api.app: message [request id]"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", None)
        return super().formatMessage(record) + (f" [{request_id}]" if request_id else "")


class JsonFormatter(logging.Formatter):
    """An object per line: time (ISO 8601, UTC), level, logger, message, request_id, exception, and for a line
    about a request also method, path, status, seconds and timings."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", None):
            line["request_id"] = request_id
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
