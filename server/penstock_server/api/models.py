"""/v1/models: the names of the model."""

from __future__ import annotations

import time
from collections.abc import Collection

from fastapi import APIRouter

from penstock_server.facade.engine import ServedEngine
from penstock_server.protocol.answer_bodies import Model, ModelList
from penstock_server.routing.checks import check_model
from penstock_server.routing.descriptions import ERRORS
from penstock_server.settings.settings import Settings


class ModelRoutes:
    def __init__(self, engine: ServedEngine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._created = int(time.time())

    def router(self) -> APIRouter:
        router = APIRouter(tags=["openai"], responses=ERRORS)
        router.get("/models")(self.list_models)
        router.get("/models/{model:path}")(self.retrieve_model)
        return router

    async def list_models(self) -> ModelList:
        """All names of the model, and its adapters. The route answers while the model loads, too."""
        return ModelList(data=[self._model(name) for name in (*self._settings.model_names, *self._adapters)])

    async def retrieve_model(self, model: str) -> Model:
        if model not in self._adapters:
            check_model(model, self._settings)
        return self._model(model)

    @property
    def _adapters(self) -> Collection[str]:
        return (self._engine.loaded if self._engine.is_ready else self._settings).adapters

    def _model(self, name: str) -> Model:
        loaded = self._engine.loaded.model if self._engine.is_ready else None
        return Model(
            id=name,
            created=self._created,
            root=name if name in self._adapters else self._settings.model_names[0],
            parent=self._settings.model_names[0] if name in self._adapters else None,
            max_model_len=loaded.max_model_len if loaded else None,
            max_blanks=loaded.forms.max_blanks if loaded else None,
            task=loaded.task if loaded else None,
            model_impl=loaded.model_impl if loaded else None,
            is_batch_invariant=loaded.is_batch_invariant if loaded else None,
        )
