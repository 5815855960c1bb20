"""CPM-1 behind the real server: a prompt has the original's tokens, and an answer ends with <eod>."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from cpm_folders import save_cpm1_model
from cpm_originals import cpm1

from .server_process import ServerProcess

PROMPT = "天空是蔚蓝色的，"
ANSWER = "窗外 有一只猫\n在睡觉。"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_cpm1_model(tmp_path_factory.mktemp("cpm") / "cpm-1", PROMPT, ANSWER)


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with ServerProcess(str(folder)) as server:
        yield server.wait_until_ready().url


def test_a_text_prompt_is_completed_to_its_end(url: str, folder: Path) -> None:
    encode, _ = cpm1(folder)
    body = {"prompt": PROMPT, "max_tokens": 100, "temperature": 0, "logprobs": 0}
    reply = httpx2.post(f"{url}/v1/completions", json=body)
    assert reply.status_code == 200
    (choice,) = reply.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (ANSWER, "stop")
    usage = reply.json()["usage"]
    assert usage["prompt_tokens"] == len(encode(PROMPT))
    assert usage["completion_tokens"] == len(encode(ANSWER)) + 1
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert "".join(tokens) == ANSWER
    for token, offset in zip(tokens, offsets, strict=True):
        assert ANSWER.startswith(token, offset - offsets[0])


def test_a_streamed_answer_is_the_whole_answer(url: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 100, "temperature": 0, "stream": True}
    with httpx2.stream("POST", f"{url}/v1/completions", json=body) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    assert lines[-1] == "[DONE]"
    assert "".join(choice["text"] for choice in choices) == ANSWER
    assert choices[-1]["finish_reason"] == "stop"


def test_limits_of_the_model(url: str) -> None:
    (model,) = httpx2.get(f"{url}/v1/models").json()["data"]
    assert model["max_model_len"] == 1024
    reply = httpx2.post(f"{url}/v1/completions", json={"prompt": "天空 " * 1024, "max_tokens": 1})
    assert reply.status_code == 400 and "1024" in reply.json()["error"]["message"]


def test_tokens_of_a_text(url: str, folder: Path) -> None:
    encode, _ = cpm1(folder)
    ids = httpx2.post(f"{url}/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    assert ids == encode(PROMPT)
    text = httpx2.post(f"{url}/detokenize", json={"tokens": ids}).json()["prompt"]
    assert text.replace(",", "，") == PROMPT


def test_an_answer_of_a_given_form(url: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "structured_outputs": {"choice": ["窗外 有公园", "公园"]}}
    reply = httpx2.post(f"{url}/v1/completions", json=body)
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["text"] in body["structured_outputs"]["choice"]
