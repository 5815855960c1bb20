"""ModelPool: several models within one budget of memory, loaded when requests ask for them."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock import EngineStatus, SpareMemory
from penstock.errors import EngineDead, EngineStopped, PenstockError
from penstock.goes_with import Feature, check_together
from penstock_server.facade.engine import ServedEngine
from penstock_server.facade.needs import Survey, survey
from penstock_server.models.each_model import each_model
from penstock_server.models.model_scheduler import ModelScheduler
from penstock_server.models.pooled_model import ModelInUse, PooledModel
from penstock_server.models.served_models import STOP_S, OneModel, ServedModels, raise_while_loading
from penstock_server.settings.settings import Settings

logger = logging.getLogger(__name__)


class ModelPool(ServedModels):
    swaps = True

    def __init__(
        self,
        models: Sequence[PooledModel],
        look: Callable[[], Survey],
        keep_alive_s: float = math.inf,
        max_waiting: int = 1024,
        spare: SpareMemory | None = None,
    ) -> None:
        """models: the first one is loaded at the start, and so are the pinned ones. look() looks at the files
        of all, on another thread. keep_alive_s, max_waiting, spare: see ModelScheduler."""
        super().__init__(models)
        self._look = look
        self.model_scheduler = ModelScheduler(self.models, keep_alive_s, max_waiting, self._die, spare)
        self._status = EngineStatus("loading", 0, 0)
        self._settled, self._ended = asyncio.Event(), asyncio.Event()
        self._beginning: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._beginning = asyncio.create_task(self._begin())

    async def stop(self) -> bool:
        if self._status.state != "dead":
            self._status = EngineStatus("stopped", 0, 0)
        if self._beginning is not None:
            self._beginning.cancel()
        has_ended = await self.model_scheduler.close(EngineStopped(), STOP_S)
        self._settled.set()
        self._ended.set()
        return has_ended

    @property
    def status(self) -> EngineStatus:
        loading = next((model.engine for model in self.models if model.state == "loading"), None)
        if self._status.state == "loading" and loading is not None:
            return replace(loading.status, state="loading", error=None)
        return self._status

    async def wait_until_ready(self) -> None:
        await self._settled.wait()
        self._raise_if_dead()

    async def wait_until_ended(self) -> None:
        await self._ended.wait()
        self._raise_if_dead()

    async def use(
        self, model: PooledModel, keep_alive_s: float | None = None, limit_s: float | None = None
    ) -> ModelInUse:
        raise_while_loading(self.status)
        self._raise_if_dead()
        return await self.model_scheduler.use(model, keep_alive_s, limit_s)

    def retire(self, model: PooledModel) -> None:
        self.model_scheduler.retire(model)

    async def _begin(self) -> None:
        """Looks at all models, and loads the pinned ones and the first one."""
        try:
            found = await asyncio.to_thread(self._look)
            self.model_scheduler.budget_bytes = found.budget_bytes
            for model, needs in zip(self.models, found.needs, strict=True):
                model.needs = needs
            pinned = [model for model in self.models if model.is_pinned]
            for model in dict.fromkeys([*pinned, self.models[0]]):
                await self.model_scheduler.load(model, is_patient=True)
        except PenstockError as error:
            self._die(error)
        except Exception as error:
            logger.exception("the models could not be looked at")
            self._die(EngineDead(f"internal error: {error!r}"))
        else:
            self._status = EngineStatus("ready", 0, 0)
            self._settled.set()

    def _die(self, error: PenstockError) -> None:
        logger.error("the models can't be served: %s", error)
        self._status = EngineStatus("dead", 0, 0, str(error))
        self._settled.set()
        self._ended.set()

    def _raise_if_dead(self) -> None:
        if self._status.state == "dead":
            raise EngineDead(self._status.error or "")


def served_models(settings: Settings) -> ServedModels:
    """The models of a server's settings. Raises PenstockError."""
    each = each_model(settings)
    if len(each) == 1 and settings.keep_alive is None:
        return OneModel(ServedEngine.of(each[0]), each[0])
    if settings.allow_runtime_lora_updating and settings.keep_alive != math.inf:
        check_together({Feature.RUNTIME_LORA, Feature.KEEP_ALIVE})
    spare = SpareMemory()
    models = [_pooled(own, own.model_names[0] in settings.pin, spare) for own in each]
    pinned = [index for index, model in enumerate(models) if model.is_pinned]
    keep_alive_s = math.inf if settings.keep_alive is None else settings.keep_alive
    look = functools.partial(survey, each, pinned)
    return ModelPool(models, look, keep_alive_s, settings.max_queued_seqs, spare)


def _pooled(settings: Settings, is_pinned: bool, spare: SpareMemory) -> PooledModel:
    def make(host_bytes: int, is_patient: bool) -> ServedEngine:
        return ServedEngine.of(replace(settings, host_memory=host_bytes), is_patient, spare)

    return PooledModel(
        settings.model_names, make, aliases=(settings.model,), is_pinned=is_pinned, adapters=settings.adapters
    )
