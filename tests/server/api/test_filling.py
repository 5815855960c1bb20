"""/v1/fill and `suffix`, over engines of small models: what is asked of the engine, and what clients get."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cpm_folders import save_cpm2
from cpm_originals import lines_of
from starlette.testclient import TestClient
from transformers import MT5Config, MT5ForConditionalGeneration

from conftest import save_tiny_llama, wait_until_ready
from fakes import FakeAsyncEngine
from penstock import AsyncEngine, Engine
from penstock_server.api.app import create_app
from penstock_server.facade.engine import ServedEngine
from penstock_server.settings.settings import Settings

from ..conftest import MakeClient, sse_events

TEXT = "今天____很好，我们去______吧！"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_cpm2(tmp_path_factory.mktemp("fill") / "cpm-2")
    torch.manual_seed(2)
    sizes: dict[str, Any] = {
        "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 1,
        "eos_token_id": 7, "pad_token_id": 5, "vocab_size": len(lines_of(folder)),
    }  # fmt: skip
    MT5ForConditionalGeneration(MT5Config(**sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def cpm2(folder: Path) -> Iterator[TestClient]:
    engine = ServedEngine(AsyncEngine(lambda report: Engine.load(folder)))
    with TestClient(create_app(engine, Settings(model="cpm-2")), base_url="http://localhost") as client:
        wait_until_ready(client)
        yield client


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A Llama whose vocabulary has StarCoder's tokens."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("fill") / "coder"
    save_tiny_llama(folder, vocab_size=281)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    engine = ServedEngine(AsyncEngine(lambda report: Engine.load(folder)))
    with TestClient(create_app(engine, Settings(model="coder")), base_url="http://localhost") as client:
        wait_until_ready(client)
        yield client


def test_a_decoder_fills_in_one_blank(coder: TestClient) -> None:
    ids = coder.post("/tokenize", json={"prompt": "the water"}).json()["tokens"]
    rest = coder.post("/tokenize", json={"prompt": "the pipe"}).json()["tokens"]
    body = {"temperature": 0, "max_tokens": 12}
    asked = {"prompt": [278, *ids, 279, *rest, 280], "stop_token_ids": [278, 279, 280], **body}
    (choice,) = coder.post("/v1/completions", json=asked).json()["choices"]
    filled = ask(coder, prompt="the water____the pipe", **body).json()
    (span,) = filled["spans"]
    assert (span["text"], span["finish_reason"]) == (choice["text"], choice["finish_reason"])
    assert filled["text"] == f"the water{choice['text']}the pipe" and len(choice["text"]) > 1
    suffixed = {"prompt": "the water", "suffix": "the pipe", **body}
    assert coder.post("/v1/completions", json=suffixed).json()["choices"][0]["text"] == choice["text"]
    cut = ask(coder, prompt="the water____the pipe", temperature=0, max_tokens_per_blank=2).json()
    assert cut["spans"][0]["finish_reason"] == "length" and cut["usage"]["completion_tokens"] == 2
    status, param, message = error_of(ask(coder, prompt="a____b____c"))
    assert (status, param) == (400, "prompt") and "one blank" in message


def test_a_beam_search_for_one_blank_is_that_of_a_completion(coder: TestClient) -> None:
    """Both end at StarCoder's tokens; the fields of the search are the same ones."""
    ids = coder.post("/tokenize", json={"prompt": "the water"}).json()["tokens"]
    rest = coder.post("/tokenize", json={"prompt": "the pipe"}).json()["tokens"]
    search = {"use_beam_search": True, "best_of": 4, "length_penalty": 0.5, "max_tokens": 12}
    asked = {"prompt": [278, *ids, 279, *rest, 280], "stop_token_ids": [278, 279, 280], **search}
    (choice,) = coder.post("/v1/completions", json=asked).json()["choices"]
    filled = ask(coder, prompt="the water____the pipe", **search).json()
    greedy = ask(coder, prompt="the water____the pipe", max_tokens=12).json()
    assert filled["spans"][0]["text"] == choice["text"] != greedy["spans"][0]["text"]


def test_beams_fill_all_blanks(cpm2: TestClient) -> None:
    greedy = ask(cpm2, max_tokens_per_blank=3).json()
    search = {"use_beam_search": True, "max_tokens_per_blank": 3}
    assert ask(cpm2, **search, best_of=1).json()["spans"] == greedy["spans"], "one beam is greedy"
    found = ask(cpm2, **search, best_of=4).json()
    assert [span["finish_reason"] in ("stop", "length") for span in found["spans"]] == [True, True]
    *_, last, _ = sse_events(ask(cpm2, **search, best_of=4, stream=True).text)
    assert last["text"] == found["text"] and last["usage"] == found["usage"]
    assert error_of(ask(cpm2, best_of=4))[:2] == (400, "best_of")


def ask(client: TestClient, **body: Any) -> Any:
    return client.post("/v1/fill", json={"prompt": TEXT, "temperature": 0} | body)


def error_of(answer: Any) -> tuple[int, str | None, str]:
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def test_each_blank_has_its_text(cpm2: TestClient) -> None:
    answer = ask(cpm2, max_tokens_per_blank=3).json()
    first, second = answer["spans"]
    assert [(span["index"], span["position"]) for span in (first, second)] == [(0, 2), (1, 12)]
    assert {first["finish_reason"], second["finish_reason"]} <= {"stop", "length"}
    assert answer["text"] == f"今天{first['text']}很好，我们去{second['text']}吧！"
    assert (answer["object"], answer["model"]) == ("fill", "cpm-2")
    assert answer["usage"]["completion_tokens"] <= 2 * 4


@pytest.mark.parametrize("prompt", ["今天____", TEXT])
def test_a_limit_of_each_blank_is_the_reason_of_its_end(cpm2: TestClient, folder: Path, prompt: str) -> None:
    word, first = 20, lines_of(folder).index("<s_1>")
    num_blanks = prompt.count("____")
    for biases, text, reason in (
        ({word: 100}, 2 * lines_of(folder)[word], "length"),
        ({first + number: 100 for number in range(num_blanks)}, "", "stop"),
    ):
        body = {"prompt": prompt, "max_tokens_per_blank": 2, "logit_bias": biases}
        answer = ask(cpm2, **body).json()
        ends = [(span["text"], span["finish_reason"]) for span in answer["spans"]]
        assert ends == [(text, reason)] * num_blanks
        assert answer["usage"]["completion_tokens"] == num_blanks * (3 if text else 1)
        chunks = sse_events(ask(cpm2, **body, stream=True).text)[:-1]
        told = [span["finish_reason"] for chunk in chunks for span in chunk["spans"]]
        assert [each for each in told if each] == [reason] * num_blanks


def test_a_stream_adds_up(cpm2: TestClient) -> None:
    whole = ask(cpm2, max_tokens_per_blank=3).json()
    *chunks, last, done = sse_events(ask(cpm2, max_tokens_per_blank=3, stream=True).text)
    assert done == "[DONE]" and last["spans"] == []
    assert {chunk["system_fingerprint"] for chunk in (*chunks, last)} == {whole["system_fingerprint"]}
    assert (last["text"], last["usage"]["completion_tokens"]) == (
        whole["text"],
        whole["usage"]["completion_tokens"],
    )
    texts, ends = ["", ""], [None, None]
    for span in (span for chunk in chunks for span in chunk["spans"]):
        assert ends[span["index"]] is None, "nothing follows the end of a blank"
        texts[span["index"]] += span["text"]
        ends[span["index"]] = span["finish_reason"]
    assert texts == [span["text"] for span in whole["spans"]]
    assert ends == [span["finish_reason"] for span in whole["spans"]]


def test_a_limit_ends_all_blanks_that_are_open(cpm2: TestClient) -> None:
    answer = ask(cpm2, max_tokens=1, allowed_token_ids=[20]).json()
    assert [span["finish_reason"] for span in answer["spans"]] == ["length", "length"]
    assert answer["spans"][1]["text"] == "" and answer["usage"]["completion_tokens"] == 1


def test_one_blank_takes_stop_strings(cpm2: TestClient) -> None:
    body = {"prompt": "今天____", "max_tokens": 6, "min_tokens": 6, "seed": 1, "temperature": 1}
    text = ask(cpm2, **body).json()["spans"][0]["text"]
    cut = ask(cpm2, **body, stop=text[2]).json()["spans"][0]
    assert cut["text"] == text[: text.index(text[2])] and cut["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": "今天很好"}, "prompt", "<span> or ____"),
        ({"prompt": "<span>" * 190}, "prompt", "190 blanks; this model fills in 189 blanks"),
        ({"prompt": TEXT, "blank": "[..]"}, "prompt", "'[..]'"),
        ({"prompt": TEXT, "stop": "。"}, "stop", "2 blanks"),
        ({"prompt": TEXT, "min_tokens": 2}, "min_tokens", "2 blanks"),
        ({"prompt": TEXT, "include_stop_str_in_output": True}, "include_stop_str_in_output", "2 blanks"),
        ({"prompt": TEXT, "ignore_eos": True}, "ignore_eos", "end token"),
        (
            {"prompt": "____", "min_tokens": 4, "max_tokens_per_blank": 3},
            "min_tokens",
            "at most max_tokens_per_blank, which is 3",
        ),
        ({"prompt": TEXT, "max_tokens": 0}, "max_tokens", "greater"),
        ({"prompt": TEXT, "logprobs": 2}, "logprobs", "logprobs"),
        ({"prompt": TEXT, "max_tokens": 100_000}, "prompt", "context"),
    ],
)
def test_refusals_say_what_to_do(cpm2: TestClient, body: dict[str, Any], param: str, words: str) -> None:
    status, named, message = error_of(cpm2.post("/v1/fill", json=body))
    assert status == 400 and words in message
    assert named == param or "context" in words


def test_a_model_that_cannot_fill(make_client: MakeClient) -> None:
    client = make_client(FakeAsyncEngine())
    status, param, message = error_of(client.post("/v1/fill", json={"prompt": "a <span> b"}))
    assert (status, param) == (400, "prompt") and "fill-in-the-middle" in message
    assert "use /v1/completions or" in message
    status, param, message = error_of(client.post("/v1/completions", json={"prompt": "a", "suffix": "b"}))
    assert (status, param) == (400, "suffix") and "can't fill in blanks" in message
    assert "leave suffix out, or take a model that can" in message
    assert client.get("/v1/models").json()["data"][0]["max_blanks"] == 0


def test_a_suffix_is_a_text_behind_one_blank(cpm2: TestClient) -> None:
    body = {"temperature": 0, "max_tokens": 5}
    filled = ask(cpm2, prompt="今天____很好", **body).json()
    answer = cpm2.post(
        "/v1/completions", json={"prompt": "今天", "suffix": "很好", "logprobs": 0} | body
    ).json()
    (choice,) = answer["choices"]
    assert choice["text"] == filled["spans"][0]["text"]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    for fields, param in (({"echo": True}, "suffix"), ({"prompt": [5, 6]}, "suffix")):
        status, named, _ = error_of(
            cpm2.post("/v1/completions", json={"prompt": "今天", "suffix": "很好"} | fields)
        )
        assert (status, named) == (400, param)


def test_cpm2_continues_a_text_behind_its_last_sentinel(cpm2: TestClient, folder: Path) -> None:
    body = {"prompt": "今天天气", "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    (choice,) = cpm2.post("/v1/completions", json=body).json()["choices"]
    last = len(lines_of(folder)) - 1
    assert choice["prompt_token_ids"][-1] == last and 0 not in choice["token_ids"]
    plain = cpm2.post("/v1/completions", json=body | {"add_special_tokens": False}).json()["choices"][0]
    assert plain["prompt_token_ids"] == choice["prompt_token_ids"][:-1]
    for field, value in (("echo", True), ("prompt_logprobs", 0)):
        status, param, message = error_of(cpm2.post("/v1/completions", json=body | {field: value}))
        assert (status, param) == (400, field) and "no meaning" in message


def test_the_model_says_that_it_can(cpm2: TestClient) -> None:
    assert cpm2.get("/v1/models").json()["data"][0]["max_blanks"] == 189


def test_the_beginnings_of_answers_take_room(cpm2: TestClient) -> None:
    """Every answer begins with the decoder's start, and those in CPM-2's form with a sentinel as well."""
    context = cpm2.get("/v1/models").json()["data"][0]["max_model_len"]
    long = [20] * (2 * context)
    cases: list[tuple[dict[str, Any], int, int]] = [
        ({"prompt": long, "truncate_prompt_tokens": -1}, context - 2, 1),
        ({"prompt": long, "truncate_prompt_tokens": -1, "max_tokens": 4}, context - 5, 4),
        ({"prompt": "天" * (2 * context), "truncate_prompt_tokens": -1}, context - 3, 1),
        ({"prompt": long[: context - 9]}, context - 9, 8),
    ]
    for body, num_prompt, num_answer in cases:
        answer = cpm2.post("/v1/completions", json=body | {"logit_bias": {20: 100}})
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, num_answer)
    text = "天" * (context - 10) + "____"
    for limit in (context, None):
        answer = ask(cpm2, prompt=text, logit_bias={20: 100}, max_tokens_per_blank=limit).json()
        assert answer["usage"]["total_tokens"] == context - 2
        assert answer["spans"][0]["finish_reason"] == "length"
