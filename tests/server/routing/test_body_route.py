"""Bodies that are large or hostile, on every route: what is refused, with which field.
tests/bench/hostile_bodies.py measures seconds and bytes."""

from __future__ import annotations

import json
import logging
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.testclient import TestClient

from fakes import FakeAsyncEngine
from penstock_server.protocol.errors import ApiError
from penstock_server.routing import body_route
from penstock_server.routing.body_route import BodyRoute

from ..conftest import MakeClient

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def all_routes(make_client: MakeClient, engine: FakeAsyncEngine) -> TestClient:
    return make_client(engine, allow_runtime_lora_updating=True, lora_memory=1 << 20)


def paths(client: TestClient) -> list[str]:
    """Of the routes that take a body."""
    document = client.get("/openapi.json").json()["paths"]
    return [path for path, methods in document.items() if "requestBody" in methods.get("post", {})]


@pytest.mark.inner
def test_every_route_with_a_body_is_a_body_route(all_routes: TestClient) -> None:
    assert {"/v1/chat/completions", "/api/chat", "/v1/messages", "/v1/rerank", "/v1/load_lora_adapter"} <= {
        *paths(all_routes)
    }
    found: list[Any] = [*all_routes.app.routes]  # type: ignore[attr-defined]
    seen = 0
    while found:
        route = found.pop()
        inner = getattr(route, "original_router", None) or getattr(route, "router", None)
        found += getattr(inner, "routes", [])
        if isinstance(route, APIRoute) and route.body_field is not None:
            assert isinstance(route, BodyRoute), route.path
            seen += 1
    assert seen >= 15


@pytest.mark.parametrize(
    "kind", ["application/x+json", "application/vnd.api+json; charset=utf-8", "text/plain", "a/b", ""]
)
def test_no_body_of_another_type_is_read(
    all_routes: TestClient, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """FastAPI would read any `+json` at once and on the event loop. Ollama's routes take every type for JSON,
    and read it as all others."""

    async def body(request: Request) -> bytes:
        raise AssertionError("read without limits")

    listed = paths(all_routes)
    monkeypatch.setattr(Request, "body", body)
    deep = b'{"b":' + b"[" * 1000
    for path in listed:
        answer = all_routes.post(path, content=deep, headers={"Content-Type": kind})
        assert answer.status_code == (400 if path.startswith("/api/") else 415), (path, answer.text)


def hostile() -> Iterator[tuple[str, bytes, int, str | None]]:
    """(kind, body, status, param), each of about 3 MB."""
    n = 1_000_000
    yield "lists", b'{"made_up":[' + b"[]," * n + b"1]}", 413, "made_up"
    yield "objects", b'{"a":1,"messages":[' + b"{}," * n + b"1]}", 413, "messages"
    yield "strings", b'{"stop_token_ids":[' + b'"",' * n + b"1]}", 413, "stop_token_ids"
    yield (
        "members",
        b'{"metadata":{' + b",".join(b'"%d":1' % each for each in range(n // 2)) + b"}}",
        413,
        "metadata",
    )
    yield "deep lists", b'{"b":' + b"[" * n, 400, "b"
    yield "deep objects", b'{"c":' + b'{"d":' * n, 400, "c"
    yield "a wide text", b'{"prompt":"' + b"a" * 12 * n + "😀".encode() + b'"}', 413, "prompt"


@pytest.mark.inner
@pytest.mark.parametrize(("kind", "body", "status", "param"), hostile(), ids=[each[0] for each in hostile()])
def test_bodies_that_would_take_too_much(
    all_routes: TestClient, engine: FakeAsyncEngine, kind: str, body: bytes, status: int, param: str | None
) -> None:
    for path in paths(all_routes):
        answer = all_routes.post(path, content=body, headers=JSON)
        assert answer.status_code == status, (path, answer.text)
        error = answer.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert len(message) < 300 and str(param) in message
        if not isinstance(error, str) and "param" in error:
            assert error["param"] == param
    assert not engine.streams


def test_wrong_lists_and_objects_name_their_first_mistake(all_routes: TestClient) -> None:
    """These mistakes are few enough to be read."""
    texts: Any = [""] * 10_000
    many = {f"a{number}": 1 for number in range(20_000)}
    for path in paths(all_routes):
        for field in (
            "prompt",
            "messages",
            "input",
            "tools",
            "documents",
            "stop",
            "options",
            "tokens",
            "stop_token_ids",
        ):
            answer = all_routes.post(path, json={field: texts})
            assert answer.status_code == 400 and len(answer.text) < 1000, (path, field, answer.text[:300])
        answer = all_routes.post(path, json=many)
        assert answer.status_code == 400 and "20000 members" in answer.text, answer.text[:300]


@pytest.mark.anyio
async def test_a_refused_body_is_not_kept_by_its_error() -> None:
    """The error lives until its answer is sent, and the answer waits for the rest of the body."""
    messages = iter([{"type": "http.request", "body": b"x" * 1000, "more_body": True}] * 3)

    async def receive() -> Any:
        if (message := next(messages, None)) is None:
            raise ApiError(503, "Busy.")
        return message

    with pytest.raises(ApiError) as caught:
        await body_route._received(Request({"type": "http"}, receive))
    kept = [each for frame, _ in traceback.walk_tb(caught.tb) for each in frame.f_locals.values()]
    assert [len(each) for each in kept if isinstance(each, bytearray)] == [0]


@pytest.mark.parametrize("size", [100, 100_000])
def test_large_bodies_are_read_on_a_thread(
    make_client: MakeClient, engine: FakeAsyncEngine, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    names = []
    read = body_route.read_body

    def noted(data: bytearray) -> Any:
        names.append(threading.current_thread().name)
        return read(data)

    monkeypatch.setattr(body_route, "read_body", noted)
    client = make_client(engine)
    assert (
        client.post("/v1/completions", json={"prompt": "x", "metadata": {"a": "b" * size}}).status_code == 200
    )
    assert len(names) == 1 and names[0].startswith("bodies") == (size > 1000)


def test_large_requests_that_are_right(make_client: MakeClient) -> None:
    """A million token ids, a long chat with tools, 2,048 texts, and base64 with an emoji beside it."""
    engine = FakeAsyncEngine()
    client = make_client(engine)
    ids = json.dumps({"prompt": [[each % 250 for each in range(1000)]] * 1024})
    answer = client.post("/v1/completions", content=ids, headers=JSON)
    assert answer.json()["error"]["code"] in ("invalid_value", "context_length_exceeded"), answer.text[:200]
    ids = json.dumps({"tokens": [each % 250_000 for each in range(1 << 20)]})
    assert "1048576 tokens; this route takes" in client.post("/detokenize", content=ids, headers=JSON).text
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": json.dumps({"a": ["x"] * 9})},
    }
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "x 😀"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "y"},
        {"role": "assistant", "content": "好"},
    ]
    schema = {
        "type": "object",
        "properties": {f"p{each}": {"type": "string", "enum": ["a"]} for each in range(60)},
    }
    tools = [
        {"type": "function", "function": {"name": f"f{each}", "parameters": schema}} for each in range(128)
    ]
    answer = client.post("/tokenize", json={"messages": turns * 1024, "tools": tools})
    assert answer.status_code in (200, 400) and "request_too_large" not in answer.text
    assert "characters" in answer.text or answer.status_code == 200, answer.text[:300]
    image = {"prompt": "😀", "metadata": {"image": "A" * 12_000_000}}
    assert client.post("/v1/completions", json=image).status_code == 200
    answer = client.post("/v1/embeddings", json={"input": ["text"] * 2048})
    assert answer.json()["error"]["code"] == "unsupported_endpoint"


def test_a_body_that_is_no_json_or_none_at_all(client: TestClient) -> None:
    assert "no body" in client.post("/v1/completions", headers=JSON).text
    wrong = client.post("/v1/completions", content=b'{"prompt": }', headers=JSON).json()["error"]
    assert wrong["code"] == "invalid_json" and "line 1 column 12" in wrong["message"]


# -- unknown fields with --lenient: left out, and named in a header and in the log ----------------------

FOREIGN: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "x": 1}], "y": {}}],
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, "z": 1}, "z": 2},
    "made_up": [1],
    "a\nb": 1,
}
NAMES = ["a\\nb", "made_up", "messages.0.content.0.x", "messages.0.y"]


def test_unknown_fields_are_left_out(make_client: MakeClient, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeAsyncEngine()
    client = make_client(engine, lenient=True)
    with caplog.at_level(logging.INFO):
        answer = client.post("/v1/chat/completions", json=FOREIGN | {"temperature": 0.5})
    assert answer.status_code == 200, answer.text
    found = answer.headers["x-penstock-ignored"].split(", ")
    assert found[0] in ("a?b", "a\\nb")
    assert found[1:] == [*NAMES[1:], "response_format.json_schema.z", "response_format.z"]
    assert engine.streams[0].params.temperature == 0.5 and engine.streams[0].params.grammar is not None
    (line,) = [record for record in caplog.records if "ignored" in record.getMessage()]
    assert "made_up" in line.getMessage() and "\n" not in line.getMessage()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "Hi"}),
        ("responses", {"input": "Hi"}),
        ("messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
        ("tokenize", {"prompt": "Hi"}),
    ],
)
def test_on_all_routes(make_client: MakeClient, path: str, body: dict[str, Any]) -> None:
    body = body | {"made_up": 1}
    refused = make_client(FakeAsyncEngine()).post(f"/v1/{path}", json=body)
    assert refused.status_code == 400 and "made_up: there is no such field" in refused.text
    answer = make_client(FakeAsyncEngine(), lenient=True).post(f"/v1/{path}", json=body)
    assert answer.status_code == 200 and answer.headers["x-penstock-ignored"] == "made_up"


def test_other_mistakes_are_refused_still(make_client: MakeClient) -> None:
    client = make_client(FakeAsyncEngine(), lenient=True)
    refused = client.post("/v1/chat/completions", json=FOREIGN | {"temperature": "hot"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "temperature"
    assert client.post("/v1/completions", json={"prompt": "x", "typical_p": 0.5}).status_code == 400
    assert "x-penstock-ignored" not in client.post("/v1/completions", json={"prompt": "x"}).headers


def test_a_stream_is_left_as_it_is(make_client: MakeClient) -> None:
    client = make_client(FakeAsyncEngine(), lenient=True)
    answer = client.post("/v1/chat/completions", json=FOREIGN | {"stream": True})
    assert answer.headers["x-penstock-ignored"] and answer.text.endswith("data: [DONE]\n\n")
