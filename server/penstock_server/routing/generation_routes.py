"""GenerationRoutes: what routes that generate have in common."""

from __future__ import annotations

from penstock_server.facade.engine import ServedEngine
from penstock_server.facade.model import ServedModel
from penstock_server.prompts.text_thread import TextThread
from penstock_server.routing.checks import find_model
from penstock_server.routing.responder import Responder
from penstock_server.settings.settings import Settings


class GenerationRoutes:
    def __init__(
        self, engine: ServedEngine, settings: Settings, texts: TextThread, responder: Responder
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._texts = texts
        self._responder = responder

    def _model(self, name: str | None) -> ServedModel:
        """find_model()"""
        return find_model(name, self._engine, self._settings)
