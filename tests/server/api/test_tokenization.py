"""/tokenize and /detokenize."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from starlette.testclient import TestClient

from fakes import EOS, FakeAsyncEngine
from penstock.async_engine import EngineStatus
from penstock_server.api.tokenization import Tokens

from ..conftest import MakeClient

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_a_prompt(client: TestClient, path: str) -> None:
    answer = client.post(path, json={"prompt": "Hé", "model": "tiny"})
    tokens = [0x48, 0xC3, 0xA9]
    assert answer.json() == {"count": 3, "max_model_len": 1000, "tokens": tokens, "token_strs": None}
    named = client.post(path, json={"prompt": "H", "return_token_strs": True}).json()
    assert named["token_strs"] == ["<72>"]


def test_the_answer_is_made_where_texts_are_read(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the event loop: pieces are an object per token."""
    threads: list[str] = []
    make = Tokens.model_dump_json

    def noted(self: Tokens) -> str:
        threads.append(threading.current_thread().name)
        return make(self)

    monkeypatch.setattr(Tokens, "model_dump_json", noted)
    assert client.post("/tokenize", json={"content": "Hi", "with_pieces": True}).json()["count"] == 2
    assert [name.startswith("text") for name in threads] == [True]


def test_messages(client: TestClient) -> None:
    def text(**fields: Any) -> str:
        tokens = client.post("/tokenize", json={"messages": MESSAGES} | fields).json()["tokens"]
        return bytes(tokens).decode()

    assert text() == text(add_generation_prompt=True) == "user: Hi\nassistant:"
    assert text(add_generation_prompt=False) == "user: Hi"
    assert text(continue_final_message=True) == "user: Hi..."
    assert "thinking" in text(chat_template_kwargs={"thinking": True})


def test_tools_count_as_in_a_chat(client: TestClient) -> None:
    tools = [{"type": "function", "function": {"name": "find", "description": "a tool"}}]
    body = {"messages": MESSAGES, "tools": tools}
    answer = client.post("/tokenize", json=body).json()
    assert "find" in bytes(answer["tokens"]).decode()
    assert answer["count"] == client.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]
    error = client.post("/tokenize", json={"prompt": "x", "tools": tools}).json()["error"]
    assert error["param"] == "tools"


def test_llama_servers_fields(client: TestClient) -> None:
    body = {"content": "é!", "with_pieces": True, "add_special": True, "parse_special": True}
    assert client.post("/tokenize", json=body).json()["tokens"] == [
        {"id": 0xC3, "piece": [0xC3]},
        {"id": 0xA9, "piece": [0xA9]},
        {"id": 0x21, "piece": "!"},
    ]


def test_special_tokens_are_as_each_server_has_them(client: TestClient, engine: FakeAsyncEngine) -> None:
    asked: list[bool] = []

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        asked.append(add_special_tokens)
        return [1]

    engine.model.tokenizer.encode = encode  # type: ignore[method-assign]
    for body in (
        {"prompt": "x"},
        {"prompt": "x", "add_special_tokens": False},
        {"content": "x"},
        {"content": "x", "add_special": True},
    ):
        client.post("/tokenize", json=body)
    assert asked == [True, False, False, True]


@pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
def test_back(client: TestClient, path: str) -> None:
    answer = client.post(path, json={"tokens": [*"Hé".encode(), EOS]})
    assert answer.json() == {"prompt": "Hé", "content": "Hé"}
    assert client.post(path, json={"tokens": []}).json()["prompt"] == ""


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "content": "x"}, "content"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        (
            "/tokenize",
            {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ("/tokenize", {"prompt": "x", "made_up": 1}, "made_up"),
        ("/tokenize", {"content": "x", "parse_special": False}, "parse_special"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [257]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
    ],
)
def test_wrong_fields_are_named(client: TestClient, path: str, body: Any, param: str) -> None:
    answer = client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_another_model_and_no_model(client: TestClient, make_client: MakeClient) -> None:
    assert client.post("/tokenize", json={"prompt": "x", "model": "other"}).status_code == 404
    loading = FakeAsyncEngine()
    loading.status = EngineStatus("loading", 1, 4)
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        answer = make_client(loading).post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_loading")


def test_other_methods_and_types(client: TestClient) -> None:
    wrong = client.get("/tokenize")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert client.post("/detokenize", content=b"{}").status_code == 415


def test_what_fits_no_context_by_far_is_refused(client: TestClient) -> None:
    for path, body in (
        ("/tokenize", {"prompt": "x" * 70_000}),
        ("/tokenize", {"content": "x" * 70_000}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 35_000}] * 2}),
        ("/detokenize", {"tokens": [1] * 70_000}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] in body
