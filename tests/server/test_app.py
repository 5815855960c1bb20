"""What stands before the routes: keys, ids, limits, and an answer to everything."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from starlette.testclient import TestClient

from fakes import FakeAsyncEngine
from penstock_server.app import create_app
from penstock_server.settings import Settings

from .conftest import MakeClient


def test_the_app_starts_and_stops_the_engine(engine: FakeAsyncEngine) -> None:
    fake: Any = engine
    app = create_app(fake, Settings(model="tiny"))
    assert not engine.is_started
    with TestClient(app):
        assert engine.is_started and not engine.is_stopped
    assert engine.is_stopped


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("GET", "/nothing", 404, "unknown_url"),
        ("POST", "/", 405, "method_not_allowed"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
def test_what_the_router_refuses_has_our_shape(
    client: TestClient, method: str, path: str, status: int, code: str
) -> None:
    answer = client.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["x-request-id"]
    if status == 405:
        assert answer.headers["allow"]


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
    with caplog.at_level(logging.INFO, "penstock_server.app"):
        client.get("/v1/models", headers={"X-Request-Id": "mine"})
        client.get("/health")
        client.get("/no%0Athing")
    lines = [record.getMessage() for record in caplog.records if "app" in record.name]
    assert len(lines) == 2
    assert lines[0].startswith("GET /v1/models 200") and lines[0].endswith("mine")
    assert "\n" not in lines[1]


def test_keys(make_client: MakeClient, engine: FakeAsyncEngine) -> None:
    client = make_client(engine, api_key=("one", "two"))
    for header in ({}, {"Authorization": "Bearer three"}, {"Authorization": "Basic one"}):
        answer = client.get("/v1/models", headers=header)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["x-request-id"]
    for key in ("Bearer one", "bearer two"):
        assert client.get("/v1/models", headers={"Authorization": key}).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/ping", "/version"])
def test_open_paths(make_client: MakeClient, engine: FakeAsyncEngine, path: str) -> None:
    assert make_client(engine, api_key=("one",)).get(path).status_code == 200


@pytest.mark.parametrize("path", ["/metrics", "/healthy", "/docs", "/openapi.json", "/models", "/x"])
def test_everything_else_is_guarded(make_client: MakeClient, engine: FakeAsyncEngine, path: str) -> None:
    assert make_client(engine, api_key=("one",)).get(path).status_code == 401


def test_large_bodies_are_refused(make_client: MakeClient, engine: FakeAsyncEngine) -> None:
    client = make_client(engine, max_request_size=100)
    body = json.dumps({"prompt": "x" * 100}).encode()
    headers = {"Content-Type": "application/json"}

    def in_pieces() -> Any:  # sent without a length
        yield from (body[:60], body[60:])

    for content in (body, in_pieces()):
        answer = client.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
    assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


class HangUp:
    """A client on the plain ASGI interface that leaves as soon as every sequence waits."""

    def __init__(self, body: dict[str, Any], engine: FakeAsyncEngine, num_streams: int) -> None:
        self._body: bytes | None = json.dumps(body).encode()
        self._engine = engine
        self._num_streams = num_streams
        self.sent: list[Any] = []

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        while len(self._engine.streams) < self._num_streams:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.mark.anyio
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_client_that_leaves_frees_all_its_choices(
    caplog: pytest.LogCaptureFixture, path: str, is_stream: bool
) -> None:
    engine = FakeAsyncEngine(lambda prompt, params: ["a", asyncio.Event()])
    fake: Any = engine
    app = create_app(fake, Settings(model="tiny"))
    body: dict[str, Any] = {"n": 3, "stream": is_stream}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": "Hi"}]
    else:
        body["prompt"] = "Hi"
    client = HangUp(body, engine, num_streams=3)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"test")],
    }
    with caplog.at_level(logging.INFO, "penstock_server.app"):
        await app(scope, client.receive, client.send)
    assert [stream.is_aborted for stream in engine.streams] == [True] * 3
    assert f"POST {path} 499" in caplog.text
    assert is_stream or not client.sent


def test_openapi_describes_answers_chunks_and_errors(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    assert "/v1/completions" in document["paths"] and "/completions" not in document["paths"]
    for path, whole, chunk in (
        ("/v1/completions", "Completion", "Completion"),
        ("/v1/chat/completions", "ChatCompletion", "ChatCompletionChunk"),
    ):
        answers = document["paths"][path]["post"]["responses"]
        content = answers["200"]["content"]
        assert content["application/json"]["schema"]["$ref"].endswith("/" + whole)
        assert content["text/event-stream"]["itemSchema"]["$ref"].endswith("/" + chunk)
        for status in ("400", "401", "404", "413", "415", "500", "503"):
            schema = answers[status]["content"]["application/json"]["schema"]
            assert schema["$ref"].endswith("/ErrorBody")
        assert "422" not in answers


def test_every_reference_in_openapi_leads_somewhere(client: TestClient) -> None:
    document = client.get("/openapi.json").json()

    def references(node: Any) -> Any:
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                yield node["$ref"]
            for value in node.values():
                yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)

    found = set(references(document))
    assert found
    for reference in found:
        assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"]


def test_docs_are_there(client: TestClient) -> None:
    assert client.get("/docs").status_code == 200
