import doctest
import json

import pytest

from penstock_client import failures
from penstock_client.errors import (
    APIError,
    AuthenticationFailed,
    BadRequest,
    ContextOverflow,
    DeadlineExceeded,
    NotFound,
    PermissionDenied,
    RateLimited,
    RequestTooLarge,
    ServerBusy,
    ServerError,
    StreamError,
)
from penstock_client.exchange import Reply
from penstock_client.failures import checked, error_of_event, error_of_reply, retry_after_s


def reply(status: int, body: object, **headers: str) -> Reply:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Reply(status, {name.replace("_", "-"): text for name, text in headers.items()}, content)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (307, APIError),
        (400, BadRequest),
        (401, AuthenticationFailed),
        (403, PermissionDenied),
        (404, NotFound),
        (405, APIError),
        (413, RequestTooLarge),
        (429, RateLimited),
        (500, ServerError),
        (501, ServerError),
        (502, ServerError),
        (503, ServerBusy),
        (504, DeadlineExceeded),
    ],
)
def test_class_and_status(status, kind):
    error = error_of_reply(reply(status, {"error": {"message": "no"}}), 0.0)
    assert type(error) is kind
    assert error.status == status


def test_fields():
    body = {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "code": "invalid_value",
            "param": "prompt",
        }
    }
    error = error_of_reply(reply(400, body, x_request_id="req-1"), 0.0)
    assert error.message == "too long"
    assert error.type == "invalid_request_error"
    assert error.code == "invalid_value"
    assert error.param == "prompt"
    assert error.request_id == "req-1"
    assert error.retry_after is None
    assert not error.is_retryable


def test_a_code_that_is_a_number_becomes_text():
    assert error_of_reply(reply(400, {"error": {"message": "no", "code": 400}}), 0.0).code == "400"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": "Unauthorized"}, "Unauthorized"),
        ({"message": "flat", "object": "error"}, "flat"),
        ({"detail": "Not Found"}, "Not Found"),
        (b"Service Unavailable\n", "Service Unavailable"),
        (b"", "the server answered with status 400"),
        (b"\xff", "\ufffd"),
        ({"error": {"type": "x"}}, "the server reported an error: {'type': 'x'}"),
    ],
)
def test_other_shapes_still_give_a_message(body, message):
    assert error_of_reply(reply(400, body), 0.0).message == message


@pytest.mark.parametrize(
    ("status", "is_retryable"), [(429, True), (502, True), (503, True), (500, False), (504, False)]
)
def test_only_what_was_turned_away_may_be_sent_again(status, is_retryable):
    assert error_of_reply(reply(status, {}), 0.0).is_retryable is is_retryable
    forbidden = reply(status, {}, x_should_retry="False")
    assert not error_of_reply(forbidden, 0.0).is_retryable
    # The header may forbid what we would do, but not make us repeat what may have begun.
    assert error_of_reply(reply(status, {}, x_should_retry="true"), 0.0).is_retryable is is_retryable


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("7", 7.0),
        (" 0.5 ", 0.5),
        ("-3", 0.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0),
        ("Thu, 01 Jan 1970 00:00:01 GMT", 0.0),
        ("soon", None),
        ("", None),
        ("nan", None),
        ("inf", None),
        ("Thu, 99 Jan 1970 00:00:01 GMT", None),
    ],
)
def test_retry_after(value, seconds):
    assert retry_after_s(value, now_s=10.0) == seconds


def test_retry_after_reaches_the_error():
    assert error_of_reply(reply(503, {}, retry_after="7"), 0.0).retry_after == 7.0
    date = "Thu, 01 Jan 1970 00:01:40 GMT"
    assert error_of_reply(reply(429, {}, retry_after=date), 40.0).retry_after == 60.0


def test_checked():
    success = reply(200, {})
    assert checked(success, 0.0) is success
    with pytest.raises(NotFound):
        checked(reply(404, {}), 0.0)


def test_error_event():
    error = error_of_event({"message": "no", "type": "t", "code": 500, "param": "p"}, "req-1")
    assert type(error) is StreamError
    assert (error.message, error.type, error.code, error.param) == ("no", "t", "500", "p")
    assert error.request_id == "req-1"
    assert not error.is_retryable
    assert error_of_event("broke", None).message == "broke"


@pytest.mark.parametrize("code", ["shutting_down", "overloaded", "queue_timeout", 503, 429])
def test_an_event_may_tell_what_passes(code):
    assert error_of_event({"message": "no", "code": code}, None).is_retryable


@pytest.mark.parametrize(
    "error", [{"code": "context_length_exceeded"}, {"type": "exceed_context_size_error"}]
)
def test_a_prompt_that_is_too_long_has_a_class_of_its_own(error):
    assert type(error_of_reply(reply(400, {"error": error}), 0.0)) is ContextOverflow


def test_examples_in_the_docstrings():
    result = doctest.testmod(failures)
    assert result.attempted and not result.failed
