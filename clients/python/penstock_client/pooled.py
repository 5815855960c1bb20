"""Vectors and scores of texts, as frozen values, and how they are read. Knows no HTTP library."""

from __future__ import annotations

import base64
import binascii
import sys
from array import array
from dataclasses import dataclass

from penstock_client.errors import ProtocolError
from penstock_client.exchange import JSONObject, Reply
from penstock_client.fields import get, number, objects, require
from penstock_client.parsing import traceable
from penstock_client.results import raw_field

Vector = tuple[float, ...]


@dataclass(frozen=True)
class Embeddings:
    """The answer of `embed`: a vector for each text, in the order of the texts."""

    model: str
    vectors: tuple[Vector, ...]
    prompt_tokens: int = 0
    request_id: str | None = None
    raw: JSONObject = raw_field()

    @property
    def vector(self) -> Vector:
        """The vector of the first text."""
        return self.vectors[0]


@dataclass(frozen=True)
class RankedDocument:
    """A document and how well it fits the query. index: its place among the documents that were sent."""

    index: int
    score: float
    text: str | None = None
    raw: JSONObject = raw_field()


@dataclass(frozen=True)
class Ranking:
    """The answer of `rerank`, best first."""

    model: str
    results: tuple[RankedDocument, ...]
    prompt_tokens: int = 0
    request_id: str | None = None
    raw: JSONObject = raw_field()


@dataclass(frozen=True)
class Scores:
    """The answer of `score`: how well each pair fits, in the order of the pairs."""

    model: str
    scores: tuple[float, ...]
    prompt_tokens: int = 0
    request_id: str | None = None
    raw: JSONObject = raw_field()


@traceable
def parse_embeddings(reply: Reply) -> Embeddings:
    data = reply.json_object()
    found = sorted(objects(data, "data"), key=lambda each: get(each, "index", int, 0))
    vectors = tuple(_vector(each) for each in found)
    return Embeddings(get(data, "model", str, ""), vectors, _num_tokens(data), reply.request_id, data)


@traceable
def parse_ranking(reply: Reply) -> Ranking:
    data = reply.json_object()
    results = tuple(_ranked(each) for each in objects(data, "results"))
    return Ranking(get(data, "model", str, ""), results, _num_tokens(data), reply.request_id, data)


@traceable
def parse_scores(reply: Reply) -> Scores:
    data = reply.json_object()
    found = sorted(objects(data, "data"), key=lambda each: get(each, "index", int, 0))
    scores = tuple(_score(each, "score") for each in found)
    return Scores(get(data, "model", str, ""), scores, _num_tokens(data), reply.request_id, data)


def _vector(data: JSONObject) -> Vector:
    """Numbers, or base64 of little-endian float32 numbers. Raises ProtocolError."""
    value = data.get("embedding")
    if isinstance(value, list) and all(isinstance(each, int | float) for each in value):
        return tuple(map(float, value))
    if not isinstance(value, str):
        raise ProtocolError(f"'embedding' should be numbers or base64, not {value!r:.100}")
    numbers = array("f")
    try:
        numbers.frombytes(base64.b64decode(value, validate=True))
    except (binascii.Error, ValueError) as error:
        raise ProtocolError(f"'embedding' is no base64 of numbers: {value!r:.100}") from error
    if sys.byteorder == "big":
        numbers.byteswap()
    return tuple(numbers)


def _ranked(data: JSONObject) -> RankedDocument:
    document = data.get("document")
    text = get(document, "text", str, None) if isinstance(document, dict) else document
    text = text if isinstance(text, str) else None
    return RankedDocument(require(data, "index", int), _score(data, "relevance_score"), text, data)


def _score(data: JSONObject, name: str) -> float:
    score = number(data, name)
    if score is None:
        raise ProtocolError(f"{name!r} is missing in {data!r:.200}")
    return score


def _num_tokens(data: JSONObject) -> int:
    usage: JSONObject = get(data, "usage", dict, {})
    return get(usage, "prompt_tokens", int, get(usage, "total_tokens", int, 0))
