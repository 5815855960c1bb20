"""/v1/embeddings: texts in, vectors out."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock import PoolingParams
from penstock_server.pooling_api.embedding_bodies import (
    EmbeddingList,
    EmbeddingObject,
    EmbeddingRequest,
    PooledUsage,
)
from penstock_server.prompts.pooled_texts import TextRules, read_texts
from penstock_server.routing.body_route import BodyRoute
from penstock_server.routing.descriptions import ERRORS
from penstock_server.routing.generation_routes import GenerationRoutes


class EmbeddingRoutes(GenerationRoutes):
    def router(self) -> APIRouter:
        router = APIRouter(tags=["openai"], responses=ERRORS, route_class=BodyRoute)
        router.post("/embeddings", response_model=EmbeddingList)(self.embed)
        return router

    async def embed(self, body: EmbeddingRequest, request: Request) -> Response:
        used = await self._use_pooling(body.model, request, "embed")
        model = used.model
        params = PoolingParams(body.dimensions, body.normalize)
        is_special = body.add_special_tokens is not False
        rules = TextRules(body.truncate_prompt_tokens, body.prompt_name, is_special)
        texts = await self._texts.run(lambda: read_texts(model, body.inputs, params, rules))
        vectors = await self._responder.pool(used, request, texts, body.priority, body.cache_salt or "")

        def write() -> str:
            form = body.encoding_format
            data = [EmbeddingObject.of(index, vector, form) for index, vector in enumerate(vectors)]
            return EmbeddingList(
                id=f"embd-{body.request_id or request.state.request_id}",
                created=int(time.time()),
                model=used.name,
                data=data,
                usage=PooledUsage.of(sum(len(text.token_ids) for text in texts)),
            ).model_dump_json()

        # Another thread writes the JSON: thousands of vectors are megabytes.
        return Response(await asyncio.to_thread(write), media_type="application/json")
