"""Lines for people and for programs."""

from __future__ import annotations

import json
import logging
from datetime import datetime

import pytest

from penstock_server.telemetry import logs
from penstock_server.telemetry.request_info import RequestInfo, current_request

logger = logging.getLogger("penstock_server.somewhere")


pytestmark = pytest.mark.usefixtures("own_logging")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json")
    token = current_request.set(RequestInfo("mine"))
    try:
        logger.info("two\nlines %d", 7, extra={"status": 200, "seconds": 0.5})
    finally:
        current_request.reset(token)
    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert datetime.fromisoformat(entry.pop("time")).tzinfo
    assert entry == {
        "level": "info",
        "logger": "penstock_server.somewhere",
        "message": "two\nlines 7",
        "request_id": "mine",
        "status": 200,
        "seconds": 0.5,
    }


def test_an_exception_in_json_is_still_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "json")
    try:
        raise ZeroDivisionError("oh")
    except ZeroDivisionError:
        logger.exception("failed")
    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert "Traceback" in entry["exception"] and "oh" in entry["exception"]
    assert "request_id" not in entry


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("warning", "text")
    logger.info("not shown")
    logger.warning("alone")
    token = current_request.set(RequestInfo("mine"))
    try:
        logger.warning("within")
    finally:
        current_request.reset(token)
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("WARNING penstock_server.somewhere: alone")
    assert second.endswith("WARNING penstock_server.somewhere: within [mine]")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_uvicorn_goes_the_same_way(capsys: pytest.CaptureFixture[str], log_format: str) -> None:
    logs.configure("info", log_format)
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    (line,) = capsys.readouterr().err.splitlines()
    assert "Invalid HTTP request" in line and line.startswith("{") == (log_format == "json")
