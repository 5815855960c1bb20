"""The bodies of /v1/embeddings. The rules are those of protocol/requests.py. `user` is accepted without
effect."""

from __future__ import annotations

import base64
from array import array
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from penstock_server.protocol.generation_fields import CacheSalt, Priority, RequestId
from penstock_server.protocol.wire import Count, PositiveCount, Text, Wire

#: As at OpenAI.
MAX_INPUTS = 2048


def _kind(value: object) -> str:
    """The tag of a form of `input`: a text, a list of texts, token ids, a list of lists of token ids."""
    if not isinstance(value, list):
        return "string"
    first = value[0] if value else ""
    return "token lists" if isinstance(first, list) else "tokens" if isinstance(first, int) else "strings"


TokenIds = Annotated[list[Count], Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS)]
Input = Annotated[
    Annotated[Text, Tag("string")]
    | Annotated[Texts, Tag("strings")]
    | Annotated[TokenIds, Tag("tokens")]
    | Annotated[list[TokenIds], Field(max_length=MAX_INPUTS), Tag("token lists")],
    Discriminator(_kind),
]


class EmbeddingRequest(Wire):
    """Body of POST /v1/embeddings."""

    model: str | None = Field(None, description="A name that /v1/models lists; may be left out.")
    input: Input = Field(description="Text or token ids; a list of either is several inputs.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: the bytes of little-endian float32 numbers; float if null."
    )
    dimensions: PositiveCount | None = Field(
        None, description="Numbers of each vector, if the model's config.json allows fewer than all."
    )

    # sentence-transformers' and vLLM's extensions
    prompt_name: Text | None = Field(
        None, description="The name of a text of the model's own that stands in front of each text, as query."
    )
    normalize: bool | None = Field(
        None, description="Whether vectors have length 1; as the model's files say if null."
    )
    add_special_tokens: bool | None = Field(None, description="true if null")
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = Field(
        None, description="Keep so many tokens of each text; -1: as many as the model takes."
    )
    request_id: RequestId | None = Field(None, description="Part of the answer's id.")
    priority: Priority | None = Field(None, description="Lower runs earlier.")
    cache_salt: CacheSalt | None = None

    # accepted without effect
    user: str | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        given: Any = self.input
        if isinstance(given, str) or isinstance(given[0], int):
            return [given]
        return list(given)


class PooledUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, num_tokens: int) -> PooledUsage:
        return cls(prompt_tokens=num_tokens, total_tokens=num_tokens)


class EmbeddingObject(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str

    @classmethod
    def of(cls, index: int, vector: array[float], encoding_format: str | None) -> EmbeddingObject:
        if encoding_format != "base64":
            return cls(index=index, embedding=vector.tolist())
        return cls(index=index, embedding=base64.b64encode(vector.tobytes()).decode())


class EmbeddingList(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[EmbeddingObject]
    usage: PooledUsage
