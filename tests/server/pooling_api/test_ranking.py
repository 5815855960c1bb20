"""/v1/score and /v1/rerank over engines of tiny models, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from embedding_models import save, save_tokenizer
from penstock import Engine, EngineConfig

from .test_embeddings import error_of, serve

QUERY = "what is a turbine"
DOCUMENTS = ["water from the dam feeds a turbine", "a cat sat", "the river"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rank") / "bert"
    save(folder, "BertForSequenceClassification", num_labels=1)
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    yield from serve(folder)


def test_scores_are_those_of_pairs(client: TestClient, folder: Path, tmp_path: Path) -> None:
    """Of tokens and types as transformers' tokenizer has them; INT8 and float16 K and V take some digits."""
    from transformers import AutoModelForSequenceClassification

    body = {"text_1": QUERY, "text_2": DOCUMENTS}
    answer = client.post("/score", json=body).json()
    assert client.post("/v1/score", json=body).json()["data"] == answer["data"]
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = save_tokenizer(tmp_path)
    with torch.inference_mode():
        for score, document in zip(answer["data"], DOCUMENTS, strict=True):
            inputs = tokenizer(QUERY, document, return_tensors="pt", return_token_type_ids=True)
            expected = float(torch.sigmoid(model(**inputs).logits[0, 0]))
            assert score["score"] == pytest.approx(expected, abs=0.02)
    assert answer["usage"] == {"prompt_tokens": 14 + 10 + 9, "total_tokens": 33}
    each = client.post("/score", json={"text_1": DOCUMENTS, "text_2": DOCUMENTS}).json()["data"]
    alone = client.post("/score", json={"text_1": DOCUMENTS[2], "text_2": DOCUMENTS[2]}).json()["data"]
    assert each[2]["score"] == alone[0]["score"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(client: TestClient, path: str) -> None:
    scores = client.post("/score", json={"text_1": QUERY, "text_2": DOCUMENTS}).json()["data"]
    body = {
        "query": QUERY,
        "documents": [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]],
        "model": "tiny",
    }
    results = client.post(path, json=body).json()["results"]
    expected = sorted(((each["score"], each["index"]) for each in scores), reverse=True)
    assert [(each["relevance_score"], each["index"]) for each in results] == expected
    assert all(each["document"] == {"text": DOCUMENTS[each["index"]]} for each in results)
    best = client.post(path, json=body | {"top_n": 1, "return_documents": False}).json()["results"]
    assert best == [{key: value for key, value in results[0].items() if key != "document"}]


def test_long_documents(client: TestClient) -> None:
    def score(**fields: Any) -> Any:
        return client.post("/rerank", json={"query": "river", "documents": ["water " * 80]} | fields)

    assert error_of(score())[0] == 400
    exact = score(documents=["water " * 5]).json()["results"][0]["relevance_score"]
    assert score(max_tokens_per_doc=5).json()["results"][0]["relevance_score"] == exact
    assert score(truncate_prompt_tokens=9).json()["results"][0]["relevance_score"] == exact
    assert score(truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == 64


def test_what_is_refused(client: TestClient) -> None:
    uneven = {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}
    assert error_of(client.post("/score", json=uneven))[1] == "text_1"
    told = {"query": "a", "documents": ["b"], "instruction": "Be strict."}
    assert error_of(client.post("/rerank", json=told))[1] == "instruction"
    assert error_of(client.post("/v1/embeddings", json={"input": "a"}))[0] == 400
    # The query is read again for each document.
    many = {"query": "a" * 1000, "documents": ["b"] * 2048, "truncate_prompt_tokens": 9}
    assert error_of(client.post("/rerank", json=many))[1] == "documents"


@pytest.mark.parametrize("template", ["own", "Qwen3-Reranker's"])
def test_a_decoder_that_says_yes_or_no(template: str, tmp_path: Path) -> None:
    """The probability of "yes" beside "no", behind the text that the template writes."""
    save(tmp_path, "Qwen3ForCausalLM", is_decoder=True, head_dim=16, num_key_value_heads=1,
         max_position_embeddings=256)  # fmt: skip
    tokenizer = save_tokenizer(tmp_path, is_decoder=True)
    if template == "own":
        written = "text {{ messages[0]['content'] }} query {{ messages[1]['content'] }}"
        roles = "{% if messages[0]['role'] == 'query' and messages[1]['role'] == 'document' %}"
        tokenizer.chat_template = f"{roles}{written}{{% endif %}}"
        tokenizer.save_pretrained(tmp_path)
        text = f"text {QUERY} query {DOCUMENTS[0]}"
    else:
        text = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
            'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
            "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that answer "
            "the query\n"
            f"<Query>: {QUERY}\n<Document>: {DOCUMENTS[0]}<|im_end|>\n<|im_start|>assistant\n<think>\n\n"
            "</think>\n\n"
        )
    with Engine.load(
        tmp_path, EngineConfig(runner="pooling", score_tokens=("no", "yes"), num_threads=1)
    ) as engine:
        ((expected,),) = engine.pool([engine.tokenizer.encode(text, add_special_tokens=False)])
    for client in serve(tmp_path, score_tokens=("no", "yes")):
        body = {"query": QUERY, "documents": DOCUMENTS[:1]}
        (result,) = client.post("/rerank", json=body).json()["results"]
        assert result["relevance_score"] == expected and 0 < expected < 1
        told = client.post("/rerank", json=body | {"instruction": "the river"})
        if template != "own":
            assert told.json()["results"][0]["relevance_score"] != expected
