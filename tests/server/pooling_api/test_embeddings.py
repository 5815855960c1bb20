"""/v1/embeddings over an engine with a tiny BERT: what the openai package gets, and what is refused."""

from __future__ import annotations

import base64
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from starlette.testclient import TestClient

from conftest import save_tiny_llama, wait_until_ready
from embedding_models import save, save_modules
from penstock import AsyncEngine, Engine, EngineConfig
from penstock_server.api.app import create_app
from penstock_server.facade.engine import ServedEngine
from penstock_server.settings.settings import Settings

TEXTS = ["the pipe feeds water to the turbine", "a cat sat on the mat", "river"]
PROMPTS = {"query": "query text ", "document": ""}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embed") / "bert"
    save(folder, "BertModel", matryoshka_dimensions=[8, 16])
    save_modules(folder, "mean_tokens", PROMPTS)
    return folder


def serve(folder: Path, **settings: Any) -> Iterator[TestClient]:
    config = EngineConfig(**{"num_threads": 1} | settings)
    engine = ServedEngine(AsyncEngine(lambda report: Engine.load(folder, config)))
    with TestClient(create_app(engine, Settings(model="tiny")), base_url="http://localhost") as client:
        wait_until_ready(client)
        yield client


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    yield from serve(folder, kv_dtype="float32")


@pytest.fixture
def package(client: TestClient) -> openai.OpenAI:
    """The openai package over the server."""
    return openai.OpenAI(api_key="-", base_url="http://localhost/v1", http_client=client, max_retries=0)


def ask(client: TestClient, **body: Any) -> Any:
    return client.post("/v1/embeddings", json=body)


def error_of(response: Any) -> tuple[int, str | None, str]:
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


def test_the_openai_package(package: openai.OpenAI, folder: Path) -> None:
    """The package asks for base64, and reads floats of it."""
    answer = package.embeddings.create(model="tiny", input=TEXTS)
    assert [each.index for each in answer.data] == [0, 1, 2] and answer.model == "tiny"
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 9 + 8 + 3
    with Engine.load(folder, EngineConfig(num_threads=1, kv_dtype="float32")) as engine:
        expected = engine.pool([engine.tokenizer.encode(text) for text in TEXTS])
    assert [each.embedding for each in answer.data] == expected
    one = package.embeddings.create(model="tiny", input=TEXTS[1], encoding_format="float")
    assert one.data[0].embedding == pytest.approx(expected[1])
    short = package.embeddings.create(model="tiny", input=TEXTS[1], dimensions=8).data[0].embedding
    beginning = torch.tensor(expected[1][:8])
    assert short == pytest.approx((beginning / beginning.norm()).tolist(), abs=1e-6)


def test_forms_of_input(client: TestClient) -> None:
    ids = [client.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in TEXTS]
    texts = ask(client, input=TEXTS).json()["data"]
    assert ask(client, input=ids).json()["data"] == texts
    assert ask(client, input=ids[0]).json()["data"] == texts[:1]
    coded = ask(client, input=TEXTS[0], encoding_format="base64").json()["data"][0]["embedding"]
    numbers = struct.unpack("<32f", base64.b64decode(coded))
    assert list(numbers) == pytest.approx(texts[0]["embedding"], abs=0)


def test_prompts_and_lengths(client: TestClient) -> None:
    def vector(text: str, **fields: Any) -> Any:
        return ask(client, input=text, **fields).json()["data"][0]["embedding"]

    assert vector("river", prompt_name="query") == vector("query text river") != vector("river")
    assert error_of(ask(client, input="river", prompt_name="x"))[1] == "prompt_name"
    long = "river " * 70
    status, _, message = error_of(ask(client, input=long))
    assert status == 400 and "64 tokens" in message
    cut = ask(client, input=long, truncate_prompt_tokens=-1).json()
    assert cut["usage"]["prompt_tokens"] == 64
    # The tokens around a text stay when its end is left out.
    assert vector(long, truncate_prompt_tokens=5) == vector("river river river")
    length = torch.tensor(vector("river", normalize=False)).norm()
    assert abs(float(length) - 1) > 1e-3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dimensions": 9}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [[900]]}, "prompt"),
        ({"input": ["x"] * 2049}, "input"),
        ({"late_chunking": True}, "late_chunking"),
    ],
)
def test_what_is_refused(client: TestClient, fields: dict[str, Any], param: str) -> None:
    status, found, _ = error_of(ask(client, **{"input": "river"} | fields))
    assert status == 400 and (found or "").startswith(param)


def test_a_model_of_vectors_writes_no_text(client: TestClient) -> None:
    assert client.get("/v1/models/tiny").json()["task"] == "embed"
    for path, body in (
        ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("completions", {"prompt": "a"}),
        ("fill", {"prompt": "a ____"}),
        ("rerank", {"query": "a", "documents": ["b"]}),
    ):
        status, param, message = error_of(client.post(f"/v1/{path}", json=body))
        assert (status, param) == (400, "model") and "/v1/embeddings" in message


def test_a_model_that_writes_says_how_to_get_vectors(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    for client in serve(tmp_path):
        status, param, message = error_of(ask(client, input="a"))
        assert (status, param) == (400, "model") and "--runner pooling" in message and "bge-m3" in message
    for client in serve(tmp_path, runner="pooling"):
        assert len(ask(client, input="a").json()["data"][0]["embedding"]) > 8


def test_a_folder_may_want_lower_case(folder: Path, tmp_path: Path) -> None:
    """The tokenizer alone would find no word."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": None}))
    for is_lower in (True, False):
        told = json.dumps({"max_seq_length": 40, "do_lower_case": is_lower})
        (tmp_path / "sentence_bert_config.json").write_text(told)
        for client in serve(tmp_path):
            both = ask(client, input=["The River", "the river"]).json()["data"]
            assert (both[0]["embedding"] == both[1]["embedding"]) is is_lower
            assert client.get("/v1/models/tiny").json()["max_model_len"] == 40


def test_more_texts_than_are_computed_at_a_time(client: TestClient) -> None:
    data = ask(client, input=["a cat", *["river"] * 300, "a cat"]).json()["data"]
    assert len(data) == 302 and data[0]["embedding"] == data[-1]["embedding"] != data[5]["embedding"]
