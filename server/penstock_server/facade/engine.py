"""ServedEngine: the engine as the server sees it. Requests go in, outputs and snapshots come out."""

from __future__ import annotations

from penstock import AsyncEngine, EngineStatus, GenerationRequest, RequestStream, ValidRequest
from penstock_server.facade.inside import model_of, served_plan_of, snapshot_of
from penstock_server.facade.loading import load_engine
from penstock_server.facade.model import ServedModel
from penstock_server.facade.snapshot import EngineSnapshot
from penstock_server.protocol.engine_bodies import ServedPlanBody
from penstock_server.settings.settings import Settings


class ServedEngine:
    """An engine for one event loop. No method blocks the loop."""

    def __init__(self, engine: AsyncEngine) -> None:
        """engine: not started yet; start() starts it."""
        self._engine = engine

    @classmethod
    def of(cls, settings: Settings) -> ServedEngine:
        """An engine that loads the model of the settings when it is started."""
        return cls(AsyncEngine(lambda report: load_engine(settings, report)))

    # -- its life -------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to load the model. Call start() on the event loop that will use the engine."""
        self._engine.start()

    async def stop(self) -> None:
        """Ends all requests, and ends loading."""
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
        """Waits until stop() was called. Raises EngineDead with the reason if the engine ends by itself."""
        await self._engine.wait_until_ended()

    # -- what it answers ------------------------------------------------------------------------

    @property
    def model(self) -> ServedModel:
        """The loaded model. Raises EngineDead if none is loaded."""
        return model_of(self._engine.engine)

    @property
    def max_num_seqs(self) -> int:
        """The most sequences in a step. Raises EngineDead."""
        return self._engine.engine.config.max_num_seqs

    @property
    def max_requests(self) -> int:
        """The most requests that may run and wait together. Raises EngineDead."""
        return self._engine.max_requests

    def validate(self, request: GenerationRequest) -> ValidRequest:
        """A request that the engine can compute. Raises ContextOverflow, InvalidParameter, EngineDead."""
        return self._engine.engine.validate(request)

    def submit(self, request: ValidRequest) -> RequestStream:
        """Queues a request. Raises QueueFull, EngineDead."""
        return self._engine.submit(request)

    # -- how it stands --------------------------------------------------------------------------

    def snapshot(self) -> EngineSnapshot:
        """The engine's counters at this moment. Raises EngineDead."""
        return snapshot_of(self._engine.engine)

    def plan(self) -> ServedPlanBody:
        """The memory plan. Raises EngineDead."""
        return served_plan_of(self._engine.engine)
