"""ServedEngine: the engine as the server has it. Requests go in, outputs come out, its state can be seen."""

from __future__ import annotations

from penstock import AsyncEngine, EngineStatus, GenerationRequest, RequestStream, ValidRequest
from penstock_server.facade.inside import model_of, served_plan_of, snapshot_of
from penstock_server.facade.loading import load_engine
from penstock_server.facade.model import ServedModel
from penstock_server.facade.snapshot import EngineSnapshot
from penstock_server.protocol.engine_bodies import ServedPlanBody
from penstock_server.settings.settings import Settings


class ServedEngine:
    """For one event loop, which it never blocks."""

    def __init__(self, engine: AsyncEngine) -> None:
        """`engine` is not started yet: start() does it."""
        self._engine = engine

    @classmethod
    def of(cls, settings: Settings) -> ServedEngine:
        """One that loads what the settings describe, once it is started."""
        return cls(AsyncEngine(lambda report: load_engine(settings, report)))

    # -- its life -------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to load. Call it on the event loop that will use it."""
        self._engine.start()

    async def stop(self) -> None:
        """Ends all requests, and what is being loaded."""
        await self._engine.stop()

    @property
    def status(self) -> EngineStatus:
        return self._engine.status

    @property
    def is_ready(self) -> bool:
        return self._engine.status.state == "ready"

    async def wait_until_ready(self) -> None:
        """Raises EngineDead with the reason if loading failed."""
        await self._engine.wait_until_ready()

    async def wait_until_ended(self) -> None:
        """Until the engine was stopped. Raises EngineDead with the reason if it ended by itself."""
        await self._engine.wait_until_ended()

    # -- what it answers ------------------------------------------------------------------------

    @property
    def model(self) -> ServedModel:
        """Raises EngineDead while there is none."""
        return model_of(self._engine.engine)

    @property
    def max_num_seqs(self) -> int:
        """Most sequences in a step. Raises EngineDead."""
        return self._engine.engine.config.max_num_seqs

    @property
    def max_requests(self) -> int:
        """Most requests that may run and wait. Raises EngineDead."""
        return self._engine.max_requests

    def validate(self, request: GenerationRequest) -> ValidRequest:
        """What can be computed. Raises ContextOverflow and InvalidParameter, EngineDead if there is no
        engine."""
        return self._engine.engine.validate(request)

    def submit(self, request: ValidRequest) -> RequestStream:
        """Queues a request. Raises QueueFull, EngineDead if there is no engine."""
        return self._engine.submit(request)

    # -- how it stands --------------------------------------------------------------------------

    def snapshot(self) -> EngineSnapshot:
        """Raises EngineDead."""
        return snapshot_of(self._engine.engine)

    def plan(self) -> ServedPlanBody:
        """What lies where. Raises EngineDead."""
        return served_plan_of(self._engine.engine)
