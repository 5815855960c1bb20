"""/api/embed and its older form, /api/embeddings."""

from __future__ import annotations

import time
from array import array
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, BeforeValidator, Field

from penstock import PoolingParams
from penstock_server.models.pooled_model import ModelInUse
from penstock_server.ollama_api.any_content_type import JsonRoute
from penstock_server.ollama_api.errors import OllamaError
from penstock_server.ollama_api.names import known_name
from penstock_server.ollama_api.options import whole
from penstock_server.ollama_api.requests import NO_OPTIONS, ModelFields
from penstock_server.prompts.pooled_texts import TextRules, read_texts
from penstock_server.protocol.wire import PositiveCount, Text
from penstock_server.routing.checks import note_ignored
from penstock_server.routing.descriptions import errors_as
from penstock_server.routing.generation_routes import GenerationRoutes

#: As at OpenAI.
MAX_INPUTS = 2048


class EmbedRequest(ModelFields):
    """Body of POST /api/embed."""

    input: Text | Annotated[list[Text], Field(max_length=MAX_INPUTS)] = Field(
        description="A text or several."
    )
    truncate: bool | None = Field(
        None, description="Leave out the end of a text that is too long; true if null."
    )
    dimensions: Annotated[PositiveCount, BeforeValidator(whole)] | None = None


class OldEmbedRequest(ModelFields):
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
            router.post(path)(route)
        return router

    async def embed(self, body: EmbedRequest, request: Request) -> Embedded:
        """Vectors have length 1."""
        started = time.monotonic()
        used = await self._use_embedding(body, request)
        texts = [body.input] if isinstance(body.input, str) else body.input
        params = PoolingParams(body.dimensions, normalizes=True)
        rules = TextRules(-1 if body.truncate is not False else None)
        vectors, num_tokens = await self._embed(used, body, request, texts, params, rules)
        return Embedded(
            model=used.name,
            embeddings=[vector.tolist() for vector in vectors],
            total_duration=round((time.monotonic() - started) * 1e9),
            load_duration=0,
            prompt_eval_count=num_tokens,
        )

    async def embed_one(self, body: OldEmbedRequest, request: Request) -> OldEmbedded:
        """The vector is as long as the model makes it."""
        used = await self._use_embedding(body, request)
        texts = [body.prompt] if body.prompt else []
        vectors, _ = await self._embed(used, body, request, texts, PoolingParams(), TextRules(-1))
        return OldEmbedded(embedding=vectors[0].tolist() if vectors else [])

    async def _use_embedding(self, body: ModelFields, request: Request) -> ModelInUse:
        name = known_name(body.model, self._models)
        return await self._use_pooling(name, request, "embed", body.keep_alive_s)

    async def _embed(
        self,
        used: ModelInUse,
        body: ModelFields,
        request: Request,
        texts: list[str],
        params: PoolingParams,
        rules: TextRules,
    ) -> tuple[list[array[float]], int]:
        model = used.model
        note_ignored((body.options or NO_OPTIONS).ignored(model.max_model_len))
        read = await self._texts.run(lambda: read_texts(model, texts, params, rules))
        return await self._responder.pool(used, request, read), sum(len(text.token_ids) for text in read)
