"""Errors have OpenAI's shape, the right status, and name what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

from penstock.errors import (
    ComputationError,
    ContextOverflow,
    DeadlineExceeded,
    EngineDead,
    EngineStopped,
    InvalidParameter,
    MachineAway,
    NoTokenLeft,
    QueueFull,
    QueueTimeout,
    RequestError,
    StepFailed,
)
from penstock_server.protocol.errors import ApiError, api_error


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "param"),
    [
        (ApiError(404, "m", code="c", param="p"), 404, "not_found_error", "c", "p"),
        (HTTPException(405), 405, "invalid_request_error", "method_not_allowed", None),
        (RequestError("m"), 400, "invalid_request_error", "invalid_request", None),
        (InvalidParameter("top_p", "m"), 400, "invalid_request_error", "invalid_value", "top_p"),
        (QueueFull("m"), 503, "server_error", "overloaded", None),
        (EngineDead("secret"), 503, "server_error", "engine_dead", None),
        (EngineStopped("secret"), 503, "server_error", "shutting_down", None),
        (StepFailed(["r"], "x.safetensors is cut"), 500, "server_error", "step_failed", None),
        (MachineAway(["r"], "rank 1 is away"), 503, "server_error", "machine_away", None),
        (QueueTimeout("m"), 503, "server_error", "queue_timeout", None),
        (DeadlineExceeded("m"), 504, "server_error", "deadline_exceeded", None),
        (
            NoTokenLeft(["bad_words", "the grammar"]),
            400,
            "invalid_request_error",
            "invalid_value",
            "bad_words",
        ),
        (NoTokenLeft(["the grammar"]), 400, "invalid_request_error", "invalid_value", None),
        (ComputationError("nan"), 500, "server_error", "request_failed", None),
        (ZeroDivisionError("secret"), 500, "server_error", "internal_error", None),
    ],
)
def test_status_type_code_and_param(
    error: Exception, status: int, kind: str, code: str, param: str | None
) -> None:
    found = api_error(error)
    detail = found.body["error"]
    assert found.status_code == status
    assert (detail["type"], detail["code"], detail["param"]) == (kind, code, param)
    assert detail["message"] and "secret" not in detail["message"]


def test_context_overflow_tells_both_sizes() -> None:
    detail = api_error(ContextOverflow("too long", 30, 20)).body["error"]
    assert detail["code"] == "context_length_exceeded"
    assert (detail["n_prompt_tokens"], detail["n_ctx"]) == (30, 20)


def test_unavailable_says_when_to_retry_and_a_bug_says_not_to() -> None:
    for error, seconds in ((QueueFull("full"), "5"), (QueueFull("full", 17), "17")):
        assert api_error(error).response().headers["retry-after"] == seconds
    for error in (ValueError(), ComputationError("nan")):
        assert api_error(error).response().headers["x-should-retry"] == "false"


def test_unforeseen_error_goes_to_the_log_with_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("what happened")
    except ValueError as error:
        api_error(error)
    assert "what happened" in caplog.text and "Traceback" in caplog.text


def validation_error(body: Any, *errors: tuple[str, tuple[Any, ...], str]) -> dict[str, Any]:
    raw = [{"type": kind, "loc": ("body", *loc), "msg": text} for kind, loc, text in errors]
    error = api_error(RequestValidationError(raw, body=body))
    assert error.status_code == 400
    detail: dict[str, Any] = error.body["error"]
    return detail


def test_validation_error_leaves_out_names_of_union_members() -> None:
    body = {"messages": [{"content": [{"type": "image"}]}]}
    location = ("messages", 0, "content", "list[TextPart]", 0, "type")
    detail = validation_error(body, ("literal_error", location, "Input should be 'text'"))
    assert detail["param"] == "messages.0.content.0.type"
    assert detail["message"] == "messages.0.content.0.type: Input should be 'text'"
    assert detail["code"] == "invalid_value"


def test_validation_error_joins_what_is_said_of_one_field_and_lists_few_fields() -> None:
    detail = validation_error(
        {"stop": 3, "n": "x", "seed": "x", "top_p": "x", "top_k": "x"},
        ("string_type", ("stop", "str"), "a string"),
        ("list_type", ("stop", "list"), "a list"),
        *(("int_type", (name,), "a number") for name in ("n", "seed", "top_p", "top_k")),
    )
    assert detail["message"] == ("stop: a string or a list; n: a number; seed: a number; and 2 more")
    assert (detail["param"], detail["code"]) == ("stop", "invalid_type")


def test_missing_field_is_named_though_it_is_not_there() -> None:
    detail = validation_error({"messages": [{}]}, ("missing", ("messages", 0, "role"), "Required"))
    assert (detail["param"], detail["code"]) == ("messages.0.role", "missing_required_parameter")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "The request has no body; send a JSON object."),
        ('{"prompt": "中文"}'.encode("gbk"), "The body is not text in UTF-8 (byte 12); send JSON in UTF-8."),
        (b"[" * 100_000, "The body: lists and objects nest deeper than 128 levels."),
        (b'{"n": ' + b"9" * 5000 + b"}", "The body is not JSON that can be read: number out of range"),
    ],
)
def test_a_body_that_cannot_be_read_is_told_why(content: bytes, message: str, client: TestClient) -> None:
    headers = {"content-type": "application/json"}
    answer = client.post("/v1/completions", content=content, headers=headers)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"].startswith(message) and error["param"] is None


def test_unknown_field_is_told_in_plain_words() -> None:
    detail = validation_error(
        {"temprature": 0}, ("extra_forbidden", ("temprature",), "Extra inputs are not permitted")
    )
    assert detail["message"].startswith("temprature: there is no such field")
    assert (detail["param"], detail["code"]) == ("temprature", "unknown_parameter")


def test_half_a_surrogate_pair_in_a_name_can_be_reported() -> None:
    name = "\ud800"
    raw = {"type": "extra_forbidden", "loc": ("body", name), "msg": "unknown"}
    response = api_error(RequestValidationError([raw], body={name: 1})).response()
    assert json.loads(bytes(response.body))["error"]["param"] == name


@pytest.mark.parametrize(
    "body",
    [
        {"x" * 100_000: 1},
        {"prompt": "x", "model": "x" * 100_000},
        {"prompt": "x", "response_format": {"type": "x" * 100_000}},
        {"prompt": "x", "tools": "x" * 100_000},
    ],
)
def test_what_a_client_sent_is_shown_in_short(client: TestClient, body: Any) -> None:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code in (400, 404) and len(answer.text) < 3000
    assert len(answer.json()["error"]["param"] or "") < 300
