"""/v1/models: the names of the models."""

from __future__ import annotations

import time

from fastapi import APIRouter

from penstock_server.models.pooled_model import PooledModel, engine_of
from penstock_server.models.served_models import ServedModels
from penstock_server.protocol.answer_bodies import Model, ModelList, ModelStatus
from penstock_server.routing.checks import known_model
from penstock_server.routing.descriptions import ERRORS


class ModelRoutes:
    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._created = int(time.time())

    def router(self) -> APIRouter:
        router = APIRouter(tags=["openai"], responses=ERRORS)
        router.get("/models")(self.list_models)
        router.get("/models/{model:path}")(self.retrieve_model)
        return router

    async def list_models(self) -> ModelList:
        """All names of all models, and their adapters. The route answers while a model loads, too."""
        return ModelList(
            data=[
                self._model(name, model)
                for model in self._models.models
                for name in (*model.names, *model.adapters)
            ]
        )

    async def retrieve_model(self, model: str) -> Model:
        return self._model(model, known_model(self._models, model))

    def _model(self, name: str, model: PooledModel) -> Model:
        loaded = engine_of(model).loaded.model if model.is_ready else None
        return Model(
            id=name,
            created=self._created,
            root=name if name in model.adapters else model.name,
            parent=model.name if name in model.adapters else None,
            status=ModelStatus(value=model.state) if self._models.swaps else None,
            max_model_len=loaded.max_model_len if loaded else None,
            max_blanks=loaded.forms.max_blanks if loaded else None,
            task=loaded.task if loaded else None,
            model_impl=loaded.model_impl if loaded else None,
            is_batch_invariant=loaded.is_batch_invariant if loaded else None,
        )
