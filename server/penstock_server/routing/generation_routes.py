"""GenerationRoutes: what routes that generate have in common."""

from __future__ import annotations

from typing import Literal

from penstock_server.facade.engine import ServedEngine
from penstock_server.facade.model import ServedModel
from penstock_server.prompts.text_thread import TextThread
from penstock_server.protocol.errors import ApiError
from penstock_server.routing.checks import find_model
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
        self, engine: ServedEngine, settings: Settings, texts: TextThread, responder: Responder
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._texts = texts
        self._responder = responder

    def _model(self, name: str | None) -> ServedModel:
        """The loaded model, which a request calls by `name`. Raises what find_model() raises, and 400 for a
        model that writes no text."""
        model = self._any_model(name)
        if model.pooling is not None:
            raise ApiError(400, NO_TEXT[model.task], code="unsupported_endpoint", param="model")
        return model

    def _any_model(self, name: str | None) -> ServedModel:
        """The loaded model, whatever it is for."""
        return find_model(name, self._engine, self._settings)

    def _pooling_model(self, name: str | None, task: Literal["embed", "score"]) -> ServedModel:
        """The loaded model, if it is for vectors ("embed") or scores. Raises 400 for other models."""
        model = self._any_model(name)
        if model.task != task:
            reason = NO_POOLING if model.pooling is None else NO_TEXT[model.task]
            message = f"{reason} {MADE_FOR[task]}"
            raise ApiError(400, message, code="unsupported_endpoint", param="model")
        return model
