"""Pools of fake models, each as large as the whole memory unless a test says otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fakes import PLAN, WEIGHTS, FakeAsyncEngine, Scripts, echo_script
from penstock.async_engine import EngineStatus
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
        if self.status.state == "loading":
            await self.ended.wait()
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
        #: What loads for ever.
        self.endless: set[str] = set()

    def maker(self, name: str) -> Callable[[int, bool], ServedEngine]:
        def make(host_bytes: int, is_patient: bool) -> ServedEngine:
            self.loaded.append(name)
            self.host_bytes.append(host_bytes)
            engine: Any = Loads(self.scripts)
            engine.error = self.errors.get(name)
            if name in self.endless:
                engine.status = EngineStatus("loading", 1, 4)
            self.engines[name] = engine
            return ServedEngine(engine)

        return make

    def pool(
        self,
        *names: str,
        room: int = 1,
        pinned: tuple[str, ...] = (),
        adapters: tuple[str, ...] = (),
        task: str = "generate",
        **options: Any,
    ) -> ModelPool:
        """room: so many models fit. adapters: of each that is not loaded; task: of all."""
        models = [
            PooledModel((name,), self.maker(name), is_pinned=name in pinned, adapters=adapters)
            for name in names
        ]
        needs = ModelNeeds(SIZE, WEIGHTS, "Fake", 8, 257, 1000, task)
        survey = Survey(room * SIZE, (needs,) * len(names))
        return ModelPool(models, lambda: survey, **options)
