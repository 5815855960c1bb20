"""GenerationRoutes: what routes that generate have in common."""

from __future__ import annotations

from typing import Literal

from fastapi import Request

from penstock_server.facade.model import ServedModel
from penstock_server.models.pooled_model import ModelInUse
from penstock_server.models.served_models import ServedModels
from penstock_server.prompts.questions import Question, within_context
from penstock_server.prompts.text_thread import TextThread
from penstock_server.protocol.errors import ApiError
from penstock_server.routing.checks import note_ignored, use_model
from penstock_server.routing.responder import Responder
from penstock_server.settings.settings import Settings

#: Why a model can't do what a route is for, by its task, and what could.
NO_TEXT = {
    "embed": "This model makes vectors of texts and writes none: ask /v1/embeddings.",
    "score": "This model gives scores to pairs of texts and writes none: ask /v1/rerank or /v1/score.",
}
NO_POOLING = "This model is served to write text."
MADE_FOR = {
    "embed": "Vectors come from models that are made for them, such as BAAI/bge-m3 or "
    "Qwen/Qwen3-Embedding-0.6B, and from a decoder that is served with --runner pooling.",
    "score": "Scores come from models that are made for them, such as BAAI/bge-reranker-v2-m3 or "
    "cross-encoder/ms-marco-MiniLM-L6-v2, and from Qwen3-Reranker with --score-tokens no,yes.",
}


class GenerationRoutes:
    def __init__(
        self, models: ServedModels, settings: Settings, texts: TextThread, responder: Responder
    ) -> None:
        self._models = models
        self._settings = settings
        self._texts = texts
        self._responder = responder

    async def _use(self, name: str | None, request: Request, keep_alive_s: float | None = None) -> ModelInUse:
        """use_model(), for a model that writes text. Raises 400 for others."""
        used = await use_model(self._models, name, request, keep_alive_s)
        if used.model.pooling is not None:
            raise ApiError(400, NO_TEXT[used.model.task], code="unsupported_endpoint", param="model")
        return used

    def _cut(self, model: ServedModel, question: Question, field: str = "max_tokens") -> Question:
        """With --lenient, `question` with answers that may fill the context where it has no room for as many
        tokens as `field` allows."""
        if not self._settings.lenient:
            return question
        fitting = within_context(model, question)
        if fitting.params != question.params:
            note_ignored([f"{field} (the context has room for fewer)"])
        return fitting

    async def _use_pooling(
        self,
        name: str | None,
        request: Request,
        task: Literal["embed", "score"],
        keep_alive_s: float | None = None,
    ) -> ModelInUse:
        """use_model(), for a model of vectors ("embed") or scores. Raises 400 for others."""
        used = await use_model(self._models, name, request, keep_alive_s)
        model = used.model
        if model.task != task:
            reason = NO_POOLING if model.pooling is None else NO_TEXT[model.task]
            message = f"{reason} {MADE_FOR[task]}"
            raise ApiError(400, message, code="unsupported_endpoint", param="model")
        return used
