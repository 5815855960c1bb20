"""A student's walk: weights as CPM-2, EVA and CPM-1 were published, `penstock convert`, `penstock serve`, and
the three kinds of request, each with the answer of a float32 twin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from cpm_originals import cpm2, eva
from starlette.testclient import TestClient

from conftest import wait_until_ready
from penstock_client import Client
from penstock_server.api.app import create_app
from penstock_server.cli import main
from penstock_server.facade.engine import ServedEngine
from penstock_server.settings.settings import Settings

from .browser import OpenPage, expect
from .server_process import ServerProcess
from .students_models import (
    Twin,
    save_published_cpm1,
    save_published_cpm2,
    save_published_eva,
    save_tuned_cpm2,
)

PIECES = ["今天天气", "，我们去", "散步吧！"]
TEXT = "<span>".join(PIECES)
PROMPT, ANSWER = "天空是蔚蓝色的，", "窗外 有一只猫\n在睡觉。"


def converted(folder: Path) -> Path:
    """What `penstock convert` makes of it. The published weights are deleted: nobody needs them any more."""
    target = folder.with_name(f"{folder.name}-int8")
    assert main(["convert", str(folder), str(target), "--allow-pickle"]) == 0
    for pattern in ("*.pt", "*.bin"):
        for file in folder.glob(pattern):
            file.unlink()
    return target


@pytest.fixture(scope="module")
def cpm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("walk") / "CPM-2"
    save_published_cpm2(folder)
    return converted(folder)


@pytest.fixture(scope="module")
def blanks(cpm2_folder: Path) -> list[tuple[str, str]]:
    """The twin's texts and finish reasons."""
    return Twin.of_t5(cpm2_folder, cpm2).fill(PIECES, 5)


@pytest.fixture(scope="module")
def filled(blanks: list[tuple[str, str]]) -> str:
    (first, _), (second, _) = blanks
    return PIECES[0] + first + PIECES[1] + second + PIECES[2]


@pytest.fixture(scope="module")
def url(cpm2_folder: Path) -> Iterator[str]:
    with ServerProcess(str(cpm2_folder)) as server:
        yield server.wait_until_ready().url


def test_the_twin_has_something_to_say(blanks: list[tuple[str, str]]) -> None:
    assert [reason for _, reason in blanks] == ["stop", "stop"]
    assert all(len(text) > 1 for text, _ in blanks)


def test_two_blanks_by_http(url: str, blanks: list[tuple[str, str]], filled: str) -> None:
    body = {"prompt": TEXT, "temperature": 0, "max_tokens_per_blank": 5}
    answer = httpx2.post(f"{url}/v1/fill", json=body).json()
    assert [(span["text"], span["finish_reason"]) for span in answer["spans"]] == blanks
    assert [span["position"] for span in answer["spans"]] == [4, 14]
    assert answer["text"] == filled


def test_two_blanks_by_http_as_a_stream(url: str, blanks: list[tuple[str, str]], filled: str) -> None:
    body = {"prompt": TEXT.replace("<span>", "____"), "temperature": 0, "stream": True}
    with httpx2.stream("POST", f"{url}/v1/fill", json=body) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    *chunks, last = [json.loads(line) for line in lines[:-1]]
    texts = ["", ""]
    for span in (span for chunk in chunks for span in chunk["spans"]):
        texts[span["index"]] += span["text"]
    assert texts == [text for text, _ in blanks]
    assert (last["text"], lines[-1]) == (filled, "[DONE]")


def test_two_blanks_by_the_client(url: str, blanks: list[tuple[str, str]], filled: str) -> None:
    with Client(url) as client:
        answer = client.fill(TEXT, temperature=0)
        assert [(span.text, span.finish_reason) for span in answer.spans] == blanks
        again = client.stream_fill(TEXT, temperature=0).result()
    assert answer.text == filled == again.text
    assert again.usage is not None and again.usage.cached_tokens == again.usage.prompt_tokens == 9


def test_two_blanks_on_the_command_line(
    cpm2_folder: Path, filled: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fill", str(cpm2_folder), "--text", TEXT, "--temperature", "0"]) == 0
    assert capsys.readouterr().out == f"{filled}\n"


def test_two_blanks_on_the_page(url: str, filled: str, open_page: OpenPage) -> None:
    page = open_page(url, locale="zh-CN")
    page.get_by_role("radio", name="填空").check()
    page.get_by_role("button", name="设置").click()
    page.get_by_label("温度").fill("0")
    page.get_by_label("要填空的文本").fill(TEXT.replace("<span>", "____"))
    page.keyboard.press("Control+Enter")
    expect(page.get_by_label("填好的文本")).to_have_text(filled)
    page.reload()
    expect(page.get_by_label("填好的文本")).to_have_text(filled)


def ask(folder: Path, path: str, body: dict[str, Any]) -> Any:
    """An answer of the application of `penstock serve`, in this process."""
    settings = Settings(model=str(folder))
    with TestClient(create_app(ServedEngine.of(settings), settings), base_url="http://localhost") as client:
        wait_until_ready(client)
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_a_dialogue_with_eva(tmp_path: Path) -> None:
    save_published_eva(tmp_path / "EVA")
    folder = converted(tmp_path / "EVA")
    texts = ["今天天气很好！", "我们去公园？", "好的，七点在门口见。"]
    messages = [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant", "user"), texts, strict=True)
    ]
    body = {"messages": messages, "temperature": 0, "max_tokens": 12}
    choice = ask(folder, "/v1/chat/completions", body)
    answer = choice["message"]["content"], choice["finish_reason"]
    assert answer == Twin.of_t5(folder, eva).talk(texts, 12)
    assert len(answer[0]) > 1


def test_soft_prompts_of_cpm2(cpm2_folder: Path, tmp_path: Path) -> None:
    """As CPM-2-Finetune leaves them, in front of a text and where the ids below 0 say."""
    vectors, twin = save_tuned_cpm2(tmp_path / "lcqmc", 7), Twin.of_t5(cpm2_folder, cpm2)
    settings = Settings(model=str(cpm2_folder), soft_prompt=(f"lcqmc={tmp_path / 'lcqmc'}",))
    ids = [twin.encode(piece) for piece in PIECES[:2]]
    around = [-1, -2, *ids[0], -3, -4, -5, *ids[1], -7]
    wanted = {"soft_prompt": "lcqmc", "temperature": 0, "min_tokens": 5, "max_tokens": 12}
    with TestClient(create_app(ServedEngine.of(settings), settings), base_url="http://localhost") as client:
        wait_until_ready(client)
        found = [
            client.post("/v1/completions", json=wanted | {"prompt": prompt}).json()
            for prompt in (PIECES[0], around)
        ]
        refused = client.post("/v1/completions", json={"prompt": "a", "soft_prompt": "c3"})
    parts: list[list[str | range]] = [
        [range(7), PIECES[0]],
        [range(2), PIECES[0], range(2, 5), PIECES[1], range(6, 7)],
    ]
    expected = [twin.after_vectors(each, vectors, 5, 12) for each in parts]
    choices = [body["choices"][0] for body in found]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == expected
    assert expected[0] != expected[1] and all(len(text) > 1 for text, _ in expected)
    assert [body["usage"]["prompt_tokens"] for body in found] == [7 + len(ids[0]), len(around)]
    assert refused.status_code == 400 and "there are: lcqmc" in refused.json()["error"]["message"]


def test_cpm1_continues_a_text(tmp_path: Path) -> None:
    save_published_cpm1(tmp_path / "CPM-1", PROMPT, ANSWER)
    folder = converted(tmp_path / "CPM-1")
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 60}
    choice = ask(folder, "/v1/completions", body)
    answer = choice["text"], choice["finish_reason"]
    assert answer == Twin.of_gpt2(folder).complete(PROMPT, 60) == (ANSWER, "stop")
