"""Vectors and scores: what is sent, and how answers are read."""

import base64
import struct

import pytest

from penstock_client import BadRequest, ProtocolError
from penstock_client.exchange import Reply
from penstock_client.params import EmbedParams, RerankParams, ScoreParams
from penstock_client.pooled import parse_embeddings
from penstock_server.pooling_api.embedding_bodies import EmbeddingRequest
from penstock_server.pooling_api.ranking_bodies import RerankRequest, ScoreRequest

from .fake_server import Answer

USAGE = {"prompt_tokens": 7, "total_tokens": 7}
NUMBERS = (0.5, -1.25, 3.0)


def vector(index, embedding):
    return {"object": "embedding", "index": index, "embedding": embedding}


def test_embed(client, server):
    coded = base64.b64encode(struct.pack("<3f", *NUMBERS)).decode()
    data = [vector(1, list(NUMBERS)), vector(0, coded)]
    server.script.append(Answer.json({"data": data, "model": "tiny", "usage": USAGE}))
    found = client.embed(["one", "two"], dimensions=3, prompt_name="query")
    assert found.vectors == (NUMBERS, NUMBERS) and found.vector == NUMBERS
    assert (found.model, found.prompt_tokens) == ("tiny", 7)
    (received,) = server.received
    assert received.path == "/v1/embeddings"
    assert received.body == {
        "input": ["one", "two"], "encoding_format": "base64", "dimensions": 3, "prompt_name": "query",
        "model": "tiny",
    }  # fmt: skip


@pytest.mark.parametrize("embedding", ["no base64!", "QUI=", None, ["a"]])
def test_what_is_no_vector(embedding):
    body = Answer.json({"data": [vector(0, embedding)]}).body
    with pytest.raises(ProtocolError, match="embedding"):
        parse_embeddings(Reply(200, {}, body))


def test_rerank_and_score(client, server):
    results = [
        {"index": 1, "relevance_score": 0.9, "document": {"text": "b"}},
        {"index": 0, "relevance_score": 0},
    ]
    server.script.append(Answer.json({"results": results, "model": "tiny", "usage": USAGE}))
    data = [{"index": 1, "score": 0.25}, {"index": 0, "score": 0.5}]
    server.script.append(Answer.json({"data": data, "model": "tiny", "usage": USAGE}))
    ranking = client.rerank("q", ("a", "b"), top_n=2)
    assert [(each.index, each.score, each.text) for each in ranking.results] == [
        (1, 0.9, "b"),
        (0, 0.0, None),
    ]
    assert client.score("q", ["a", "b"], instruction="Be strict.").scores == (0.5, 0.25)
    first, second = (received.body for received in server.received)
    assert first == {"query": "q", "documents": ["a", "b"], "top_n": 2, "model": "tiny"}
    assert second["text_2"] == ["a", "b"] and second["instruction"] == "Be strict."


@pytest.mark.parametrize(
    ("keywords", "request_"),
    [(EmbedParams, EmbeddingRequest), (RerankParams, RerankRequest), (ScoreParams, ScoreRequest)],
)
def test_the_server_knows_every_keyword(keywords, request_):
    assert keywords.__optional_keys__ - set(request_.model_fields) == {"extra", "timeout"}


def test_a_server_that_writes_text_says_so(make_client, live_server):
    with pytest.raises(BadRequest, match="--runner pooling") as caught:
        make_client(live_server.url, model=None).embed("a")
    assert caught.value.param == "model"
