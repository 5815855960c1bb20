"""What Ollama's clients ask about models, with the real `ollama` package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from fakes import PLAN, FakeAsyncEngine, FakeModel
from penstock.engine_thread import EngineStatus

from ..conftest import MakeClient
from ..test_openai_package import LiveServer
from ..tools.chat_templates import HERMES

ollama = pytest.importorskip("ollama", reason="the extra dev has the package")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    model = FakeModel()
    model.tokenizer.tool_template = HERMES
    engine = FakeAsyncEngine(model=model)
    with LiveServer(engine, api_key=(), served_model_name=("big", "small:7b")) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Any:
    return ollama.Client(host=server.root)


def test_the_names_of_the_model(client: Any) -> None:
    models = client.list().models
    assert [model.model for model in models] == ["big", "small:7b"]
    assert models[0].size == PLAN.layers[0].num_bytes + PLAN.embedding_bytes + PLAN.head_bytes
    assert models[0].details.family == "Fake" and models[0].modified_at is not None


def test_a_model_is_shown(client: Any) -> None:
    for name in ("big", "big:latest", "small:7b"):
        shown = client.show(name)
        assert shown.modelinfo["Fake.context_length"] == 1000 and shown.template == HERMES
        assert "completion" in shown.capabilities and "tools" in shown.capabilities
    with pytest.raises(ollama.ResponseError, match="no model 'small:8b'"):
        client.show("small:8b")


def test_what_runs(client: Any) -> None:
    (running,) = client.ps().models
    assert (running.model, running.context_length, running.size_vram) == ("big", 1000, 0)


def test_the_version_is_one_that_clients_know(server: LiveServer) -> None:
    version = httpx2.get(f"{server.root}/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) > (0, 6, 4), "VS Code asks for so much"


def test_while_the_model_loads(make_client: MakeClient) -> None:
    engine = FakeAsyncEngine()
    engine.status = EngineStatus("loading", 1, 4)
    loading = make_client(engine)
    assert loading.get("/api/tags").json() == loading.get("/api/ps").json() == {"models": []}
    assert loading.post("/api/show", json={"model": "tiny"}).status_code == 503
    assert loading.get("/api/version").status_code == 200
