"""What stands before the routes, put together: limits, origins, and an answer to everything."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from starlette.testclient import TestClient

from fakes import FakeAsyncEngine
from penstock_server.api.app import create_app
from penstock_server.facade.engine import ServedEngine
from penstock_server.settings.settings import Settings

from ..conftest import MakeClient


def test_the_app_starts_and_stops_the_engine(engine: FakeAsyncEngine) -> None:
    fake: Any = engine
    app = create_app(ServedEngine(fake), Settings(model="tiny"))
    assert not engine.is_started
    with TestClient(app, base_url="http://localhost"):
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


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("POST", "/v1/v1/chat/completions", "POST /v1/v1/chat/completions here; did you mean /v1/chat/comp"),
        ("POST", "/v1/completion", "did you mean /v1/completions?"),
        ("GET", "/metric", "did you mean /metrics?"),
        ("POST", "/v1/conversations", "no POST /v1/conversations here; GET /openapi.json lists"),
        ("POST", "/v1/moderations", "GET /openapi.json lists"),
        ("POST", "/chat/completion", "did you mean /v1/chat/completions?"),
        ("GET", "/" + "x" * 9000, f"no GET /{'x' * 99} here"),
        ("GET", "/v1/%0a", r"GET /v1/\n here"),
        ("GET", "/v1/completions", "GET is not allowed for /v1/completions; it takes POST."),
    ],
)
def test_who_asks_for_what_is_not_there_is_told_the_way(
    client: TestClient, method: str, path: str, said: str
) -> None:
    error = client.request(method, path).json()["error"]
    assert said in error["message"] and len(error["message"]) < 200


def test_other_origins_are_unknown_by_default(client: TestClient) -> None:
    answer = client.get("/v1/models", headers={"Origin": "https://a.example"})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_an_allowed_origin_may_ask_and_read_refusals(
    make_client: MakeClient, engine: FakeAsyncEngine
) -> None:
    client = make_client(engine, allowed_origin=("https://a.example",), api_key=("one",))
    asking = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang",
    }
    preflight = client.options("/v1/completions", headers=asking | {"Origin": "https://a.example"})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
    refused = client.get("/v1/models", headers={"Origin": "https://a.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"
    assert "X-Request-Id" in refused.headers["access-control-expose-headers"]
    stranger = client.options("/v1/completions", headers=asking | {"Origin": "https://b.example"})
    assert stranger.status_code == 400


def test_every_origin(make_client: MakeClient, engine: FakeAsyncEngine) -> None:
    client = make_client(engine, allowed_origin=("*",))
    answer = client.get("/v1/models", headers={"Origin": "https://a.example"})
    assert answer.headers["access-control-allow-origin"] == "*"


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
@pytest.mark.parametrize("origins", [(), ("*",)])
async def test_a_client_that_leaves_frees_all_its_choices(
    caplog: pytest.LogCaptureFixture, path: str, is_stream: bool, origins: tuple[str, ...]
) -> None:
    engine = FakeAsyncEngine(lambda prompt, params: ["a", asyncio.Event()])
    fake: Any = engine
    app = create_app(ServedEngine(fake), Settings(model="tiny", allowed_origin=origins))
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
        "headers": [
            (b"content-type", b"application/json"),
            (b"host", b"localhost"),
            (b"origin", b"http://a"),
        ],
    }
    with caplog.at_level(logging.INFO, "penstock_server.middleware.request_context"):
        await app(scope, client.receive, client.send)
    assert [stream.is_aborted for stream in engine.streams] == [True] * 3
    assert f"POST {path} 499" in caplog.text
    assert is_stream or not client.sent


@pytest.mark.inner
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
        event = content["text/event-stream"]["itemSchema"]
        last, encoded = event["properties"]["data"]["anyOf"]
        assert event["required"] == ["data"] and last == {"const": "[DONE]"}
        refs = [each["$ref"].rpartition("/")[2] for each in encoded["contentSchema"]["anyOf"]]
        assert refs == [chunk, "ErrorBody"]
        for status in ("400", "401", "404", "413", "415", "500", "503"):
            schema = answers[status]["content"]["application/json"]["schema"]
            assert schema["$ref"].endswith("/ErrorBody")
        assert "422" not in answers


@pytest.mark.inner
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


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_no_page_loads_scripts_from_elsewhere(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404 and "/openapi.json" in answer.json()["error"]["message"]
