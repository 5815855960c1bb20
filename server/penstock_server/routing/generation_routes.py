"""GenerationRoutes: what routes that generate have in common."""

from __future__ import annotations

from fastapi import Request

from penstock_server.models.pooled_model import ModelInUse
from penstock_server.models.served_models import ServedModels
from penstock_server.prompts.text_thread import TextThread
from penstock_server.routing.checks import use_model
from penstock_server.routing.responder import Responder
from penstock_server.settings.settings import Settings


class GenerationRoutes:
    def __init__(
        self, models: ServedModels, settings: Settings, texts: TextThread, responder: Responder
    ) -> None:
        self._models = models
        self._settings = settings
        self._texts = texts
        self._responder = responder

    async def _use(self, name: str | None, request: Request, keep_alive_s: float | None = None) -> ModelInUse:
        """use_model()."""
        return await use_model(self._models, name, request, keep_alive_s)
