"""--lenient: unknown fields are left out, and named in a header and in the log."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from fakes import FakeAsyncEngine
from penstock_server.routing.lenient import path_in

from ..conftest import MakeClient

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


def test_names_of_union_members_are_no_steps() -> None:
    body = {"json_schema": {"a": {"b": 1}}, "b": 2}
    assert path_in(("json_schema", "a", "b"), body) == ("json_schema", "a", "b")
    assert path_in(("json_schema", "b"), body) == ("b",)
    assert path_in(("list", 0, "text", "x"), [{"x": 1}]) == (0, "x")
    assert path_in(("c",), body) is None
