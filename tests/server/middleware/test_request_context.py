"""Every request has an id, one log line, and an answer."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from starlette.testclient import TestClient

from fakes import FakeAsyncEngine
from penstock_server.telemetry.request_info import current_request

from ..conftest import MakeClient


def test_a_bug_is_a_500_with_an_id_and_a_stack_in_the_log(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(prompt: Any, params: Any) -> Any:
        raise ZeroDivisionError("secret")

    client = make_client(FakeAsyncEngine(fail))
    answer = client.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error" and "secret" not in answer.text
    assert answer.headers["x-request-id"] and answer.headers["x-should-retry"] == "false"
    assert "Traceback" in caplog.text and "secret" in caplog.text


def test_request_id_is_taken_or_made(client: TestClient) -> None:
    def ask(sent: str) -> Any:
        body = {"prompt": "x"}
        return client.post("/v1/completions", json=body, headers={"X-Request-Id": sent})

    mine = ask("mine-1")
    assert (mine.headers["x-request-id"], mine.json()["id"]) == ("mine-1", "cmpl-mine-1")
    for unfit in ("", "a b", "x" * 200):
        made = ask(unfit)
        assert made.headers["x-request-id"] != unfit
        assert made.json()["id"] == "cmpl-" + made.headers["x-request-id"]


def test_requests_are_logged_but_probes_are_not(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock_server.middleware.request_context"):
        client.get("/v1/models", headers={"X-Request-Id": "mine"})
        client.get("/health")
        client.get("/no%0Athing")
    lines = [record.getMessage() for record in caplog.records if "request_context" in record.name]
    assert len(lines) == 2
    assert lines[0].startswith("GET /v1/models 200")
    assert "\n" not in lines[1]


def test_a_line_has_figures_but_neither_prompt_nor_answer(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        client.post("/v1/completions", json={"prompt": ["secret", "secret"], "n": 2})
    (line,) = [record for record in caplog.records if "request_context" in record.name]
    fields: Any = line
    assert (fields.method, fields.path, fields.status) == ("POST", "/v1/completions", 200)
    assert fields.seconds >= 0 and fields.first_token_s >= 0
    assert (fields.prompt_tokens, fields.output_tokens) == (12, 4 * 7)
    assert "prompt_tokens 12, output_tokens 28" in caplog.text
    assert "secret" not in caplog.text and "Hello" not in caplog.text


@pytest.mark.parametrize("keys", [(), ("one",)])
def test_a_request_knows_whose_it_is(make_client: MakeClient, keys: tuple[str, ...]) -> None:
    """By key where there are keys, by address where there are none; not the key itself."""
    clients = []

    def note(prompt: Any, params: Any) -> Any:
        info = current_request.get()
        assert info is not None
        clients.append(info.client)
        return ["x"]

    client = make_client(FakeAsyncEngine(note), api_key=keys)
    client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Api-Key": "one"})
    if keys:
        assert len(clients[0]) == 16 and "one" not in clients[0]
    else:
        assert clients == ["testclient"]
    assert current_request.get() is None
