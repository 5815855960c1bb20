"""/api/embed and /api/embeddings by the ollama package, over an engine with a tiny XLM-RoBERTa."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import torch

from embedding_models import save, save_modules
from fakes import FakeAsyncEngine
from penstock import AsyncEngine, Engine, EngineConfig

from ..conftest import MakeClient
from ..test_openai_package import LiveServer

ollama = pytest.importorskip("ollama", reason="the extra dev has the package")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("ollama") / "xlm"
    save(folder, "XLMRobertaModel", pad_token_id=0, type_vocab_size=1)
    save_modules(folder, "cls_token", is_normal=False)
    engine: Any = AsyncEngine(lambda report: Engine.load(folder, EngineConfig(num_threads=1)))
    with LiveServer(engine, api_key=()) as server:
        while httpx2.get(f"{server.root}/health/ready").status_code != 200:
            time.sleep(0.05)
        yield ollama.Client(host=server.root)


def test_texts_become_vectors(client: Any) -> None:
    found = client.embed("tiny:latest", ["a cat sat", "the river"])
    assert found.model == "tiny" and found.prompt_eval_count == 5 + 4 and found.total_duration > 0
    lengths = [float(torch.tensor(vector).norm()) for vector in found.embeddings]
    assert lengths == pytest.approx([1, 1], abs=1e-6)
    assert client.embed("tiny", "the river").embeddings == found.embeddings[1:]
    assert list(client.embed("tiny", []).embeddings) == []
    old = torch.tensor(client.embeddings("tiny", "the river").embedding)
    assert abs(float(old.norm()) - 1) > 1e-3
    assert (old / old.norm()).tolist() == pytest.approx(list(found.embeddings[1]), abs=1e-6)
    assert client.show("tiny").capabilities == ["embedding"]


def test_long_texts_are_cut(client: Any) -> None:
    long = "river " * 90
    assert client.embed("tiny", long).prompt_eval_count == 63
    with pytest.raises(ollama.ResponseError, match="63 tokens"):
        client.embed("tiny", long, truncate=False)
    with pytest.raises(ollama.ResponseError, match="dimensions"):
        client.embed("tiny", "a", dimensions=4)


def test_a_model_that_writes_says_so(make_client: MakeClient) -> None:
    http: Any = make_client(FakeAsyncEngine())
    for path, body in (("embed", {"input": "x"}), ("embeddings", {"prompt": "x"})):
        answer = http.post(f"/api/{path}", json={"model": "tiny"} | body)
        assert answer.status_code == 400 and "--runner pooling" in answer.json()["error"]
