"""Adapters over HTTP, with a real engine: each API chooses them by the field model, and they come and go
while the server runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file
from starlette.testclient import TestClient

from conftest import wait_until_ready
from engine.adapter_folders import save_adapter
from penstock_server.api.app import create_app
from penstock_server.facade.engine import ServedEngine
from penstock_server.settings.settings import Settings

MESSAGES = [{"role": "user", "content": "the wheel"}]


@pytest.fixture(scope="module")
def folder(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that can chat, and the adapters "a" and "b"."""
    folder = tmp_path_factory.mktemp("adapted")
    shutil.copytree(tiny_llama, folder / "tiny")
    (folder / "tiny" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with safe_open(folder / "tiny" / "model.safetensors", "pt") as file:
        shapes = {
            name.removesuffix(".weight"): tuple(file.get_slice(name).get_shape())
            for name in file.keys()  # noqa: SIM118 (a file is no dictionary)
            if "_proj." in name
        }
    for seed, name in enumerate("ab"):
        save_adapter(folder / name, shapes, seed, size=0.5)
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    settings = Settings(
        model=str(folder / "tiny"), lora=(f"poet={folder / 'a'}",), lora_memory=1 << 20, max_model_len=128,
        allow_runtime_lora_updating=True,
    )  # fmt: skip
    with TestClient(create_app(ServedEngine.of(settings), settings), base_url="http://localhost") as client:
        wait_until_ready(client)
        yield client


def completion(client: TestClient, model: str) -> str:
    body = {"model": model, "prompt": "the water", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body).json()
    assert answer["model"] == model
    text: str = answer["choices"][0]["text"]
    return text


def test_models_lists_adapters_with_their_parents(client: TestClient) -> None:
    base, poet = client.get("/v1/models").json()["data"]
    assert (base["id"], base["root"], base["parent"]) == ("tiny", "tiny", None)
    assert (poet["id"], poet["root"], poet["parent"]) == ("poet", "poet", "tiny")
    assert client.get("/v1/models/poet").json() == poet and poet["max_model_len"] == 128
    assert [each["name"] for each in client.get("/api/tags").json()["models"]] == ["tiny", "poet"]
    assert client.get("/v1/plan").json()["adapter_bytes"] == 1 << 20


def test_each_api_chooses_by_the_model(client: TestClient) -> None:
    limit, options = {"max_tokens": 12}, {"temperature": 0, "num_predict": 12}
    apis: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": MESSAGES, "temperature": 0} | limit),
        ("/v1/responses", {"input": "the wheel", "temperature": 0, "max_output_tokens": 16}),
        ("/v1/messages", {"messages": MESSAGES, "temperature": 0} | limit),
        ("/api/chat", {"messages": MESSAGES, "stream": False, "options": options}),
        ("/v1/completions", {"prompt": "the wheel", "temperature": 0} | limit),
        ("/v1/tokenize", {"prompt": "the wheel"}),
    ]  # fmt: skip
    for path, body in apis:
        answers = {}
        for name in ("tiny", "poet"):
            found = client.post(path, json={"model": name} | body)
            assert found.status_code == 200, found.text
            answers[name] = found.json()
            assert answers[name].get("model", name) == name, path
        keys = ("choices", "output", "content", "message", "tokens")
        first, other = (next(each[key] for key in keys if key in each) for each in answers.values())
        texts = [str([part.get("text", part) if isinstance(part, dict) else part for part in _parts(each)])
                 for each in (first, other)]  # fmt: skip
        assert (texts[0] == texts[1]) == (path == "/v1/tokenize"), path


def _parts(found: Any) -> list[Any]:
    """What an answer says, without its ids."""
    first = found[0] if isinstance(found, list) else found
    if isinstance(first, dict) and "content" in first:
        return first["content"] if isinstance(first["content"], list) else [first["content"]]
    if isinstance(first, dict) and "message" in first:
        return [first["message"]["content"]]
    return found if isinstance(found, list) else [found]


def test_adapters_come_and_go(client: TestClient, folder: Path) -> None:
    plain, poet = completion(client, "tiny"), completion(client, "poet")
    load = {"lora_name": "other", "lora_path": str(folder / "b")}
    found = client.post("/v1/load_lora_adapter", json=load)
    assert (found.status_code, found.text) == (200, "Success: LoRA adapter 'other' added successfully.")
    other = completion(client, "other")
    assert len({plain, poet, other}) == 3
    again = client.post("/v1/load_lora_adapter", json=load)
    assert (again.status_code, again.json()["error"]["code"]) == (400, "adapter_name_taken")
    replaced = load | {"lora_path": str(folder / "a"), "load_inplace": True}
    assert client.post("/v1/load_lora_adapter", json=replaced).status_code == 200
    assert completion(client, "other") == poet
    unload = {"lora_name": "other", "lora_int_id": 1}
    found = client.post("/v1/unload_lora_adapter", json=unload)
    assert (found.status_code, found.text) == (200, "Success: LoRA adapter 'other' removed successfully.")
    for path, body in (
        ("/v1/unload_lora_adapter", unload),
        ("/v1/completions", {"model": "other", "prompt": "a"}),
        ("/v1/load_lora_adapter", load | {"lora_path": str(folder / "none")}),
    ):
        assert client.post(path, json=body).status_code == 404, path
    assert client.get("/v1/models/other").status_code == 404
    assert completion(client, "poet") == poet


def test_what_can_not_be_loaded(client: TestClient, folder: Path, tmp_path: Path) -> None:
    shapes = {"model.layers.0.mlp.up_proj": (96, 63)}
    wide = {f"model.layers.{index}.mlp.up_proj": (96, 64) for index in range(3)}
    for name, path, code in (
        ("tiny", folder / "a", "adapter_name_taken"),
        ("x", save_adapter(tmp_path / "shapes", shapes), "invalid_adapter"),
        ("x", folder / "tiny", "adapter_not_found"),
        ("x", save_adapter(tmp_path / "wide", wide, r=256), "no_room_for_adapter"),
    ):
        found = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})
        if code == "no_room_for_adapter":  # 3 * 2 * 256 * (64 + 128) bytes fit once, beside the others
            for number in range(5):
                body = {"lora_name": f"x{number}", "lora_path": str(path)}
                found = client.post("/v1/load_lora_adapter", json=body)
        assert found.json()["error"]["code"] == code
    for number in range(5):
        client.post("/v1/unload_lora_adapter", json={"lora_name": f"x{number}"})
    client.post("/v1/unload_lora_adapter", json={"lora_name": "x"})
    for body in ({"lora_name": "x"}, {"lora_name": "", "lora_path": "y"}, {"lora": "x"}):
        assert client.post("/v1/load_lora_adapter", json=body).status_code == 400
    assert load_file(folder / "a" / "adapter_model.safetensors")


def test_without_the_setting_there_are_no_routes(folder: Path) -> None:
    settings = Settings(model=str(folder / "tiny"), lora=(f"poet={folder / 'a'}",))
    engine = ServedEngine.of(settings)
    client = TestClient(
        create_app(engine, settings), base_url="http://localhost"
    )  # nothing is started, so that the model is loading
    body = {"lora_name": "x", "lora_path": "y"}
    assert client.post("/v1/load_lora_adapter", json=body).status_code == 404
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["tiny", "poet"]
    asked = {"model": "poet", "prompt": "a"}
    assert client.post("/v1/completions", json=asked).status_code == 503
    assert client.post("/v1/completions", json=asked | {"model": "x"}).status_code == 404
