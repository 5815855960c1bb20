"""Requests to a server with several models: what they can't have, and how they learn of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.testclient import TestClient

from fakes import FakeAsyncEngine
from penstock_server.api.app import create_app
from penstock_server.settings.settings import Settings

from ..conftest import MakeClient
from ..models.pools import Fakes


@contextmanager
def several(fakes: Fakes, pool: dict[str, Any] | None = None, **settings: Any) -> Iterator[TestClient]:
    """A server with the models a and b, of which a is loaded."""
    app = create_app(fakes.pool("a", "b", **pool or {}), Settings(model="a", **settings))
    with TestClient(app, raise_server_exceptions=False, base_url="http://localhost") as client:
        while client.get("/health").status_code != 200:
            pass
        yield client


def ask(client: TestClient, model: str) -> Any:
    return client.post("/v1/completions", json={"model": model, "prompt": [1, 2]})


def test_an_unknown_name_is_answered_with_all_names() -> None:
    with several(Fakes(), {"adapters": ("fox",)}) as client:
        answer = ask(client, "c")
        assert answer.status_code == 404
        assert "has a, b, fox." in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("limits", "status", "code"),
    [
        ({"queue_timeout": 0.01}, 503, "queue_timeout"),
        ({"request_timeout": 0.01}, 504, "deadline_exceeded"),
        ({"queue_timeout": 60.0, "request_timeout": 0.01}, 504, "deadline_exceeded"),
        ({"queue_timeout": 0.01, "request_timeout": 60.0}, 503, "queue_timeout"),
    ],
)
def test_a_model_that_loads_too_long(limits: dict[str, float], status: int, code: str) -> None:
    fakes = Fakes()
    fakes.endless.add("b")
    with several(fakes, **limits) as client:
        answer = ask(client, "b")
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert ("Retry-After" in answer.headers) is (status == 503)


def test_who_can_not_have_a_model_is_counted() -> None:
    fakes = Fakes()
    fakes.errors["b"] = "its file is gone"
    with several(fakes) as client:
        assert ask(client, "b").status_code == 503
        line = 'vllm:admission_rejections_total{engine="0",model_name="b",reason="model_unavailable"} 1.0'
        assert line in client.get("/metrics").text


def test_what_an_unloaded_model_is_for_at_ollamas_routes() -> None:
    with several(Fakes(), {"task": "embed"}) as client:
        shown = {each["name"]: each["capabilities"] for each in client.get("/api/tags").json()["models"]}
        assert shown["b"] == ["embedding"]
        assert client.post("/api/show", json={"model": "b"}).json()["capabilities"] == ["embedding"]


def test_a_pinned_model_does_not_say_that_it_goes() -> None:
    with several(Fakes(), {"pinned": ("a",), "room": 2}) as client:
        said = [
            client.post("/api/generate", json={"model": name, "keep_alive": 0}).json()["done_reason"]
            for name in ("a", "b")
        ]
        assert said == ["load", "unload"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
        ("/v1/tokenize", {"prompt": "Hi"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}], "stream": False}),
    ],
)
def test_a_name_without_letters_is_none(make_client: MakeClient, path: str, body: dict[str, Any]) -> None:
    client = make_client(FakeAsyncEngine())
    answer = client.post(path, json=body | {"model": ""})
    assert answer.status_code == 200 and answer.json().get("model", "tiny") == "tiny"
    assert client.post(path, json=body | {"model": " "}).status_code == 404
