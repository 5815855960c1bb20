"""ServedEngine: the engine's life as the server sees it: it is started, loads, is ready, and ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from penstock import AsyncEngine, EngineStatus
from penstock.errors import EngineDead
from penstock_server.facade.loaded_engine import LoadedEngine
from penstock_server.facade.loading import load_engine
from penstock_server.facade.soft_prompts import fitting, read_soft_prompts
from penstock_server.settings.settings import Settings

if TYPE_CHECKING:
    from penstock import Engine, PromptEmbeds, SpareMemory, Trouble


class ServedEngine:
    """An engine for one event loop. No method blocks the loop."""

    def __init__(self, engine: AsyncEngine, soft_prompts: Mapping[str, PromptEmbeds] | None = None) -> None:
        """engine: not started yet; start() starts it."""
        self._engine = engine
        self._soft_prompts = soft_prompts or {}

    @classmethod
    def of(
        cls, settings: Settings, is_patient: bool = True, spare: SpareMemory | None = None
    ) -> ServedEngine:
        """An engine that loads the model of the settings when it is started; is_patient, spare: see
        load_engine().
        Soft prompts are read at once: nobody waits for a model to learn that a file is missing. Raises
        PenstockError."""
        soft_prompts = read_soft_prompts(settings)

        def load(report: Callable[[int, int], None]) -> Engine:
            return fitting(load_engine(settings, report, is_patient=is_patient, spare=spare), soft_prompts)

        return cls(AsyncEngine(load), soft_prompts)

    def start(self) -> None:
        """Begins to load the model. Call start() on the event loop that will use the engine."""
        self._engine.start()

    async def stop(self, timeout_s: float | None = None) -> bool:
        """Ends all requests, and ends loading. False: the engine has not ended in so many seconds, since a
        read hangs."""
        return await self._engine.stop(timeout_s)

    @property
    def status(self) -> EngineStatus:
        return self._engine.status

    @property
    def is_ready(self) -> bool:
        return self._engine.status.state == "ready"

    @property
    def missing_machines(self) -> str:
        """The other machines for which requests wait, for people; "" if there are none."""
        with contextlib.suppress(EngineDead):
            return self.loaded.missing_machines
        return ""

    @property
    def trouble(self) -> Trouble | None:
        """Why requests should go elsewhere, though the engine is ready: steps fail, or one hangs."""
        return self._engine.trouble

    @property
    def loaded(self) -> LoadedEngine:
        """The engine with its model. Raises EngineDead while the model loads, and after the engine ended."""
        return LoadedEngine(self._engine, self._soft_prompts)

    async def wait_until_ready(self) -> None:
        """Raises EngineDead with the reason if loading failed."""
        await self._engine.wait_until_ready()

    async def wait_until_ended(self) -> None:
        """Waits until stop() was called. Raises EngineDead with the reason if the engine ends by itself."""
        await self._engine.wait_until_ended()
