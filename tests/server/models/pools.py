"""Pools of fake models, each as large as the whole memory unless a test says otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fakes import PLAN, FakeAsyncEngine, Scripts, echo_script
from penstock.errors import EngineDead
from penstock_server.facade.engine import ServedEngine
from penstock_server.facade.needs import ModelNeeds, Survey
from penstock_server.models.model_pool import ModelPool
from penstock_server.models.pooled_model import PooledModel

SIZE = PLAN.host_used_bytes


class Loads(FakeAsyncEngine):
    """An engine whose load fails if there is an error."""

    error: str | None = None

    async def wait_until_ready(self) -> None:
        await asyncio.sleep(0)
        if self.error is not None:
            raise EngineDead(self.error)


class Fakes:
    """Makes engines, and notes the names of what is loaded, in order."""

    def __init__(self, scripts: Scripts = echo_script) -> None:
        self.scripts = scripts
        self.loaded: list[str] = []
        self.host_bytes: list[int] = []
        self.engines: dict[str, Loads] = {}
        self.errors: dict[str, str] = {}

    def maker(self, name: str) -> Callable[[int, bool], ServedEngine]:
        def make(host_bytes: int, is_patient: bool) -> ServedEngine:
            self.loaded.append(name)
            self.host_bytes.append(host_bytes)
            engine: Any = Loads(self.scripts)
            engine.error = self.errors.get(name)
            self.engines[name] = engine
            return ServedEngine(engine)

        return make

    def pool(self, *names: str, room: int = 1, pinned: tuple[str, ...] = (), **options: Any) -> ModelPool:
        """room: so many models fit."""
        models = [PooledModel((name,), self.maker(name), is_pinned=name in pinned) for name in names]
        needs = ModelNeeds(SIZE, 1000, "Fake", 8, 257, 1000)
        survey = Survey(room * SIZE, (needs,) * len(names))
        return ModelPool(models, lambda: survey, **options)
