"""/api/embed and its older form, /api/embeddings."""

from __future__ import annotations

import time
from array import array
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field

from penstock import PoolingParams
from penstock_server.ollama_api.any_content_type import JsonRoute
from penstock_server.ollama_api.errors import OllamaError
from penstock_server.ollama_api.names import known_name
from penstock_server.ollama_api.options import Options
from penstock_server.ollama_api.requests import NO_OPTIONS, KeepAlive, seconds_of
from penstock_server.prompts.pooled_texts import TextRules, read_texts
from penstock_server.protocol.wire import PositiveCount, Text, Wire
from penstock_server.routing.checks import note_ignored, require_json
from penstock_server.routing.descriptions import errors_as
from penstock_server.routing.generation_routes import GenerationRoutes

#: As at OpenAI.
MAX_INPUTS = 2048


class EmbedFields(Wire):
    model: str
    options: Options | None = None

    keep_alive: KeepAlive = Field(None, description="How long the model stays loaded afterwards.")

    @property
    def keep_alive_s(self) -> float | None:
        """Seconds; None: the server's setting."""
        return seconds_of(self.keep_alive)


class EmbedRequest(EmbedFields):
    """Body of POST /api/embed."""

    input: Text | Annotated[list[Text], Field(max_length=MAX_INPUTS)] = Field(
        description="A text or several."
    )
    truncate: bool | None = Field(
        None, description="Leave out the end of a text that is too long; true if null."
    )
    dimensions: PositiveCount | None = None


class OldEmbedRequest(EmbedFields):
    """Body of POST /api/embeddings."""

    prompt: Text


class Embedded(BaseModel):
    """Durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OldEmbedded(BaseModel):
    embedding: list[float]


class OllamaEmbeddingRoutes(GenerationRoutes):
    def router(self) -> APIRouter:
        router = APIRouter(tags=["ollama"], responses=errors_as(OllamaError), route_class=JsonRoute)
        for path, route in (("/embed", self.embed), ("/embeddings", self.embed_one)):
            router.post(path, dependencies=[Depends(require_json)])(route)
        return router

    async def embed(self, body: EmbedRequest, request: Request) -> Embedded:
        """Vectors have length 1."""
        started = time.monotonic()
        texts = [body.input] if isinstance(body.input, str) else body.input
        params = PoolingParams(body.dimensions, normalizes=True)
        model, vectors, num_tokens = await self._embed(
            body, request, texts, params, body.truncate is not False
        )
        return Embedded(
            model=model,
            embeddings=[vector.tolist() for vector in vectors],
            total_duration=round((time.monotonic() - started) * 1e9),
            load_duration=0,
            prompt_eval_count=num_tokens,
        )

    async def embed_one(self, body: OldEmbedRequest, request: Request) -> OldEmbedded:
        """The vector is as long as the model makes it."""
        texts = [body.prompt] if body.prompt else []
        _, vectors, _ = await self._embed(body, request, texts, PoolingParams(), is_cut=True)
        return OldEmbedded(embedding=vectors[0].tolist() if vectors else [])

    async def _embed(
        self, body: EmbedFields, request: Request, texts: list[str], params: PoolingParams, is_cut: bool
    ) -> tuple[str, list[array[float]], int]:
        """The model's name, the vectors, and the number of tokens."""
        name = known_name(body.model, self._models)
        used = await self._use_pooling(name, "embed", request, body.keep_alive_s)
        model = used.model
        note_ignored((body.options or NO_OPTIONS).ignored(model.max_model_len))
        rules = TextRules(-1 if is_cut else None)
        read = await self._texts.run(lambda: read_texts(model, texts, params, rules))
        vectors = await self._responder.pool(used, request, read)
        return model.name, vectors, sum(len(text.token_ids) for text in read)
