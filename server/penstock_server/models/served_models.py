"""ServedModels: the models behind a server's door. OneModel: a server with one model, which stays loaded."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from penstock import EngineStatus, Trouble
from penstock_server.facade.engine import ServedEngine
from penstock_server.models.pooled_model import ModelInUse, PooledModel
from penstock_server.protocol.errors import unavailable
from penstock_server.settings.settings import Settings

#: Seconds that engines have to end. Some write keys and values for so long as KVStore's CLOSE_S.
STOP_S = 20.0


class ServedModels(ABC):
    """For one event loop. No method blocks the loop."""

    #: Models come and go; otherwise they stay loaded.
    swaps = False

    def __init__(self, models: Sequence[PooledModel]) -> None:
        self.models = tuple(models)
        #: Gets the name of a model that a request could not have, and the code of the error.
        self.count_refused: Callable[[str, str], None] = lambda name, reason: None

    @property
    def names(self) -> tuple[str, ...]:
        """All names for clients."""
        return tuple(name for model in self.models for name in model.names)

    def find(self, name: str | None) -> PooledModel | None:
        """The model of a name; the first model where a request names none."""
        if name is None:
            return self.models[0]
        return next((model for model in self.models if model.is_called(name)), None)

    @property
    def current(self) -> PooledModel:
        """The loaded model that was used last; if none is loaded, the first of all."""
        return max(self.models, key=lambda model: (model.is_ready, model.last_used))

    @property
    def is_ready(self) -> bool:
        return self.status.state == "ready"

    @property
    def missing_machines(self) -> str:
        """The machines for which requests wait (--nodes), for people; "" if there are none."""
        return ""

    @property
    def trouble(self) -> Trouble | None:
        """Why requests should go elsewhere, though a model is ready: its steps fail, or one hangs."""
        engines = (model.engine for model in self.models if model.engine is not None)
        return next((found for engine in engines if (found := engine.trouble) is not None), None)

    @property
    @abstractmethod
    def status(self) -> EngineStatus:
        """Whether requests are taken: "ready" also while a request would have to wait for its model."""

    @abstractmethod
    def start(self) -> None:
        """Begins to load. Call start() on the event loop that will use the models."""

    @abstractmethod
    async def stop(self) -> bool:
        """Ends all requests, and all engines. False: an engine has not ended in STOP_S, since a read hangs:
        only the end of the process ends it."""

    @abstractmethod
    async def wait_until_ready(self) -> None:
        """Raises EngineDead with the reason if a model could not be loaded at the start."""

    @abstractmethod
    async def wait_until_ended(self) -> None:
        """Waits until stop() was called. Raises EngineDead with the reason if an engine ends by itself."""

    @abstractmethod
    async def use(
        self, model: PooledModel, keep_alive_s: float | None = None, limit_s: float | None = None
    ) -> ModelInUse:
        """The model for one request, which closes it at its end; waits until the model is loaded.

        keep_alive_s: seconds for which the model stays loaded afterwards; None: the server's setting.
        limit_s: seconds to wait at most; None: no limit. Raises ApiError 503, QueueFull, QueueTimeout, and
        EngineDead if the engines have ended."""

    def retire(self, model: PooledModel) -> None:
        """The model goes as soon as its requests are answered, if it is one that comes and goes."""
        return


class OneModel(ServedModels):
    """Requests are refused while the model loads."""

    def __init__(self, engine: ServedEngine, settings: Settings) -> None:
        model = PooledModel(
            settings.model_names,
            engine=engine,
            aliases=(settings.model,),
            is_pinned=True,
            adapters=settings.adapters,
        )
        super().__init__((model,))
        self._engine = engine

    @property
    def missing_machines(self) -> str:
        return self._engine.missing_machines

    @property
    def status(self) -> EngineStatus:
        return self._engine.status

    def start(self) -> None:
        self._engine.start()

    async def stop(self) -> bool:
        return await self._engine.stop(STOP_S)

    async def wait_until_ready(self) -> None:
        await self._engine.wait_until_ready()

    async def wait_until_ended(self) -> None:
        await self._engine.wait_until_ended()

    async def use(
        self, model: PooledModel, keep_alive_s: float | None = None, limit_s: float | None = None
    ) -> ModelInUse:
        raise_while_loading(self.status)
        return ModelInUse(model, self._engine, time.monotonic(), lambda: None)


def raise_while_loading(status: EngineStatus) -> None:
    """Raises 503 with the progress while models are loaded for the first time."""
    if status.state == "loading":
        progress = f": {status.loaded_layers} of {status.total_layers} layers" if status.total_layers else ""
        raise unavailable(f"The model is loading{progress}.", "model_loading")
