"""The bodies of /v1/fill: a text with blanks in, the same text without blanks out. The rules are those of
requests.py. `user` and `metadata` are accepted without effect."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from penstock_server.protocol.answer_bodies import FINGERPRINT, Finish, Usage
from penstock_server.protocol.generation_fields import CacheSalt, Priority, RequestId, SamplingFields
from penstock_server.protocol.wire import OnlyTrue, PositiveCount, Text, invalid

#: No honest marker is longer. A search for a long marker in a long text takes long.
MAX_MARKER_CHARS = 64


class FillRequest(SamplingFields):
    """Body of POST /v1/fill."""

    model: str | None = Field(None, description="A name that /v1/models lists; may be left out.")
    prompt: Text = Field(
        description="A text with blanks: <span>, or four or more underscores if the text has no <span>."
    )
    blank: Annotated[Text, Field(min_length=1, max_length=MAX_MARKER_CHARS)] | None = Field(
        None, description="The text that is a blank, in place of <span> and underscores."
    )
    max_tokens: PositiveCount | None = Field(
        None, description="The most tokens of all blanks together; 128 if null."
    )
    max_tokens_per_blank: PositiveCount | None = Field(None, description="The most tokens of each blank.")
    stream: bool | None = None

    # vLLM's extensions
    skip_special_tokens: OnlyTrue = None
    request_id: RequestId | None = Field(None, description="Part of the answer's id.")
    priority: Priority | None = Field(None, description="Lower runs earlier.")
    cache_salt: CacheSalt | None = Field(
        None, description="Only prompts with the same salt share computed keys and values."
    )

    # accepted without effect
    user: str | None = None
    metadata: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_ends(self) -> FillRequest:
        if self.ignore_eos:
            raise invalid("ignore_eos", "not allowed here: the end token ends the last blank")
        most = self.max_tokens_per_blank
        if most is not None and self.min_tokens is not None and self.min_tokens > most:
            raise invalid("min_tokens", f"must be at most max_tokens_per_blank, which is {most}")
        return self


class FilledSpan(BaseModel):
    """One blank. In a chunk, the text is what came since the last chunk."""

    index: int
    #: Where the blank begins in the prompt, in characters.
    position: int
    text: str
    #: "stop": the model closed the blank. "length": max_tokens or max_tokens_per_blank did. null: the blank's
    #: text goes on in a later chunk.
    finish_reason: Finish | None = None


class FillAnswer(BaseModel):
    """The answer of /v1/fill."""

    id: str
    object: Literal["fill"] = "fill"
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT
    #: The prompt with the texts in its blanks.
    text: str
    spans: list[FilledSpan]
    usage: Usage


class FillChunk(BaseModel):
    """One event of a streamed answer. The last one has no spans, and has the whole text and the usage."""

    id: str
    object: Literal["fill.chunk"] = "fill.chunk"
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT
    spans: list[FilledSpan]
    text: str | None = None
    usage: Usage | None = None
