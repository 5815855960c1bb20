"""/v1/score and /v1/rerank: how well two texts fit."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request

from penstock_server.models.pooled_model import ModelInUse
from penstock_server.pooling_api.embedding_bodies import PooledUsage
from penstock_server.pooling_api.ranking_bodies import (
    PairFields,
    RankedDocument,
    RankedText,
    Ranking,
    RerankRequest,
    ScoreList,
    ScoreObject,
    ScoreRequest,
)
from penstock_server.prompts.pooled_texts import num_pair_chars, read_pairs
from penstock_server.routing.body_route import BodyRoute
from penstock_server.routing.descriptions import ERRORS
from penstock_server.routing.generation_routes import GenerationRoutes


class RankingRoutes(GenerationRoutes):
    def router(self) -> APIRouter:
        router = APIRouter(tags=["scores"], responses=ERRORS, route_class=BodyRoute)
        router.post("/score")(self.score)
        router.post("/rerank", response_model_exclude_none=True)(self.rerank)
        return router

    def cohere_router(self) -> APIRouter:
        """Cohere's path of the same route."""
        router = APIRouter(tags=["scores"], responses=ERRORS, route_class=BodyRoute)
        router.post("/v2/rerank", response_model_exclude_none=True)(self.rerank)
        return router

    async def score(self, body: ScoreRequest, request: Request) -> ScoreList:
        used = await self._use_pooling(body.model, request, "score")
        scores, usage = await self._scores(used, body, request, body.pairs)
        return ScoreList(
            id=f"score-{body.request_id or request.state.request_id}",
            created=int(time.time()),
            model=used.name,
            data=[ScoreObject(index=index, score=score) for index, score in enumerate(scores)],
            usage=usage,
        )

    async def rerank(self, body: RerankRequest, request: Request) -> Ranking:
        texts = body.texts
        pairs = [(body.query, text) for text in texts]
        used = await self._use_pooling(body.model, request, "score")
        scores, usage = await self._scores(used, body, request, pairs, body.max_tokens_per_doc)
        # Documents of equal scores keep their order.
        order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
        shown = body.return_documents is not False
        results = [
            RankedDocument(
                index=index,
                document=RankedText(text=texts[index]) if shown else None,
                relevance_score=scores[index],
            )
            for index in order
        ]
        name = f"rerank-{body.request_id or request.state.request_id}"
        return Ranking(id=name, model=used.name, results=results, usage=usage)

    async def _scores(
        self,
        used: ModelInUse,
        body: PairFields,
        request: Request,
        pairs: list[tuple[str, str]],
        most_second: int | None = None,
    ) -> tuple[list[float], PooledUsage]:
        model = used.model
        limit = body.truncate_prompt_tokens
        texts = await self._texts.run(
            lambda: read_pairs(model, pairs, body.instruction, limit, most_second),
            num_pair_chars(pairs, body.instruction),
        )
        found = await self._responder.pool(used, request, texts, body.priority, body.cache_salt or "")
        usage = PooledUsage.of(sum(len(text.token_ids) for text in texts))
        return [score[0] for score in found], usage
