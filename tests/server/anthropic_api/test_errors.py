"""Errors in Anthropic's form."""

from __future__ import annotations

import pytest

from penstock_server.anthropic_api.errors import message_error


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_the_type_follows_from_the_status(status: int, kind: str) -> None:
    assert message_error(status, {"message": "m"}, "r") == {
        "type": "error",
        "error": {"type": kind, "message": "m"},
        "request_id": "r",
    }


def test_a_full_context_has_the_sentence_that_claude_code_reads() -> None:
    full = {"message": "m", "code": "context_length_exceeded", "n_prompt_tokens": 300, "n_ctx": 200}
    said = message_error(400, full)["error"]
    assert said == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 300 tokens > 200 maximum",
    }
    beside = full | {"n_prompt_tokens": 150, "n_answer_tokens": 60}
    assert message_error(400, beside)["error"]["message"] == (
        "input length and `max_tokens` exceed context limit: 150 + 60 > 200, "
        "decrease input length or `max_tokens` and try again"
    )


def test_the_wrong_field_is_named_once() -> None:
    for message in ("too large", "top_k: too large"):
        error = message_error(400, {"message": message, "param": "top_k"})
        assert error["error"]["message"] == "top_k: too large" and "request_id" not in error
