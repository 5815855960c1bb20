"""What Ollama's clients ask about models, with the real `ollama` package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from fakes import WEIGHTS, FakeAsyncEngine, FakeModel
from penstock.engine_thread import EngineStatus
from penstock.weights.weight_facts import WeightFacts

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
    assert models[0].size == WEIGHTS.num_bytes and models[0].modified_at is not None


def test_what_the_files_are(server: LiveServer, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ollama's words, such as gguf, llama, 8B, Q4_K_M."""

    def details() -> list[str | None]:
        listed, shown = client.list().models[0].details, client.show("big").details
        assert listed == shown
        return [shown.format, shown.family, shown.parameter_size, shown.quantization_level]

    assert details() == ["safetensors", "fake", "1.50M", "INT8"]
    store = server.engine.engine.model.store
    monkeypatch.setattr(store, "facts", WeightFacts("gguf", "llama", "Q4_K_M", 8_000_000_000, 5 << 30))
    assert details() == ["gguf", "llama", "8B", "Q4_K_M"]
    assert client.show("big").modelinfo["general.parameter_count"] == 8_000_000_000
    monkeypatch.setattr(store, "facts", WeightFacts("safetensors", "", "INT4", 1_100_048_384, 5 << 30))
    assert details() == ["safetensors", "Fake", "1.1B", "INT4"]


def test_a_model_is_shown(client: Any) -> None:
    for name in ("big", "big:latest", "small:7b"):
        shown = client.show(name)
        assert shown.modelinfo["fake.context_length"] == 1000 and shown.template == HERMES
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
