"""The bodies of /v1/score and /v1/rerank, in vLLM's form, which is also Jina's and Cohere's. The rules are
those of protocol/requests.py. `user` is accepted without effect."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from penstock_server.pooling_api.embedding_bodies import PooledUsage
from penstock_server.protocol.generation_fields import CacheSalt, Priority, RequestId
from penstock_server.protocol.wire import PositiveCount, Text, Wire, invalid

MAX_DOCUMENTS = 2048


class PairFields(Wire):
    """What both routes have."""

    model: str | None = Field(None, description="A name that /v1/models lists; may be left out.")
    instruction: Text | None = Field(
        None, description="What fits means, for models that are told so (Qwen3-Reranker)."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = Field(
        None, description="Keep so many tokens of each pair; -1: as many as the model takes."
    )
    request_id: RequestId | None = Field(None, description="Part of the answer's id.")
    priority: Priority | None = Field(None, description="Lower runs earlier.")
    cache_salt: CacheSalt | None = None

    # accepted without effect
    user: str | None = None


Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_DOCUMENTS)]


class ScoreRequest(PairFields):
    """Body of POST /v1/score: one text and many, or as many texts as texts."""

    text_1: Text | Texts = Field(description="A text or several.")
    text_2: Text | Texts = Field(description="A text or several, each of which makes a pair with text_1.")

    @model_validator(mode="after")
    def _check_counts(self) -> ScoreRequest:
        first, second = self._listed(self.text_1), self._listed(self.text_2)
        if len(first) not in (1, len(second)):
            raise invalid(
                "text_1", f"has {len(first)} texts, and text_2 has {len(second)}: send one or as many"
            )
        return self

    @staticmethod
    def _listed(texts: str | list[str]) -> list[str]:
        return [texts] if isinstance(texts, str) else texts

    @property
    def pairs(self) -> list[tuple[str, str]]:
        first, second = self._listed(self.text_1), self._listed(self.text_2)
        return list(zip(first * (len(second) if len(first) == 1 else 1), second, strict=True))


class Document(Wire):
    text: Text


class RerankRequest(PairFields):
    """Body of POST /v1/rerank."""

    query: Text
    documents: Annotated[list[Text | Document], Field(min_length=1, max_length=MAX_DOCUMENTS)] = Field(
        description="Texts, or objects with a member `text`."
    )
    top_n: PositiveCount | None = Field(None, description="Only so many documents, the best ones.")
    return_documents: bool | None = Field(None, description="true if null")
    max_tokens_per_doc: PositiveCount | None = Field(
        None, description="The end of a longer document is left out."
    )

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class ScoreObject(BaseModel):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreList(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreObject]
    usage: PooledUsage


class RankedText(BaseModel):
    text: str


class RankedDocument(BaseModel):
    #: The document's place in the request.
    index: int
    document: RankedText | None = None
    relevance_score: float


class Ranking(BaseModel):
    id: str
    model: str
    #: Best first.
    results: list[RankedDocument]
    usage: PooledUsage
