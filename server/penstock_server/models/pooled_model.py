"""PooledModel: one of the models behind a server's door, loaded or not. ModelInUse: the same while a request
has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Literal

from penstock.errors import EngineDead
from penstock_server.facade.engine import ServedEngine
from penstock_server.facade.model import ServedModel
from penstock_server.facade.needs import ModelNeeds
from penstock_server.models.turns import Held


class PooledModel:
    """A model, and its engine while it is loaded. Only the ModelPool changes it."""

    def __init__(
        self,
        names: tuple[str, ...],
        make: Callable[[int, bool], ServedEngine] | None = None,
        *,
        engine: ServedEngine | None = None,
        aliases: tuple[str, ...] = (),
        adapters: Collection[str] = (),
        is_pinned: bool = False,
    ) -> None:
        """names: for clients; answers have the first one. aliases: names that are known and not listed.
        adapters: the names of those that the settings have, as long as the engine can't be asked.
        make(host_bytes, is_patient): an engine that is not started. engine: one that is there from the
        start."""
        self.names = names
        self.engine = engine
        self.is_pinned = is_pinned
        #: None before the files were looked at.
        self.needs: ModelNeeds | None = None
        #: What the loaded model was seen to be; None before it was first loaded.
        self.seen: ServedModel | None = None
        self.num_users = 0
        #: Seconds that the model stays loaded after its last request, and when they are over, by the pool's
        #: clock.
        self.keep_alive_s = self.expires = math.inf
        self.last_used = 0.0
        self.used_bytes = 0
        self.num_loads = 0
        #: What the last load took until requests could begin.
        self.load_s: float | None = None
        self._aliases = aliases
        self._adapters = adapters
        self._make = make

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def adapters(self) -> Collection[str]:
        """The names of adapters, each of which is a name for the model with that adapter."""
        return self.engine.loaded.adapters if self.engine is not None and self.is_ready else self._adapters

    def is_called(self, name: str) -> bool:
        return name in self.names or name in self._aliases or name in self.adapters

    @property
    def is_ready(self) -> bool:
        return self.engine is not None and self.engine.is_ready

    @property
    def resident_bytes(self) -> int:
        """Host memory with which nothing is streamed."""
        return 0 if self.needs is None else self.needs.resident_bytes

    @property
    def state(self) -> Literal["loaded", "loading", "unloaded"]:
        """As llama-server has it: "loaded", "loading" or "unloaded"."""
        if self.engine is None:
            return "unloaded"
        return "loaded" if self.engine.is_ready else "loading"

    @property
    def held(self) -> Held:
        return Held(self.name, self.used_bytes, self.num_users > 0, self.is_pinned, self.last_used)

    def make(self, host_bytes: int, is_patient: bool) -> ServedEngine:
        assert self._make is not None, "this model is never loaded anew"
        return self._make(host_bytes, is_patient)


class ModelInUse:
    """A loaded model that stays loaded until close()."""

    def __init__(
        self, pooled: PooledModel, engine: ServedEngine, asked_at: float, release: Callable[[], None]
    ) -> None:
        """asked_at: when the request asked for the model, by the monotonic clock. Raises EngineDead if the
        engine has ended."""
        self.pooled = pooled
        self.engine = engine
        self.asked_at = asked_at
        self.model = pooled.seen = engine.loaded.model
        self._release: Callable[[], None] | None = release

    @property
    def name(self) -> str:
        """Of the model without its adapter, as metrics have it; answers have the name in `model`."""
        return self.pooled.name

    def call(self, name: str | None) -> None:
        """The request calls the model so: an adapter's name chooses the adapter."""
        adapter = None if name is None else self.engine.loaded.adapters.get(name)
        own = self.name if adapter is None or name is None else name
        self.model = replace(self.model, name=own, adapter=adapter)

    def close(self) -> None:
        """Idempotent."""
        if (release := self._release) is not None:
            self._release = None
            release()


def engine_of(pooled: PooledModel) -> ServedEngine:
    """The engine of a loaded model. Raises EngineDead."""
    if pooled.engine is None:
        raise EngineDead(f"{pooled.name} is not loaded")
    return pooled.engine
