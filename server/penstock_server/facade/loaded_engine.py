"""LoadedEngine: an engine whose model is loaded. Requests go in, outputs and snapshots come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock import AsyncEngine, GenerationRequest, RequestStream, ValidRequest
from penstock_server.facade.inside import missing_machines, model_of, served_plan_of, snapshot_of, weights_of
from penstock_server.facade.model import ServedModel
from penstock_server.facade.snapshot import EngineSnapshot
from penstock_server.protocol.engine_bodies import ServedPlanBody

if TYPE_CHECKING:
    from penstock import Adapter, PromptEmbeds, WeightFacts


class LoadedEngine:
    """The engine at one moment. The engine may end, so ask ServedEngine.loaded anew for each request."""

    def __init__(self, engine: AsyncEngine, soft_prompts: Mapping[str, PromptEmbeds] | None = None) -> None:
        """Raises EngineDead if no model is loaded."""
        self._soft_prompts = soft_prompts or {}
        self._queue = engine
        self._engine = engine.engine

    @property
    def model(self) -> ServedModel:
        return replace(model_of(self._engine), soft_prompts=self._soft_prompts)

    @property
    def max_num_seqs(self) -> int:
        """The most sequences in a step."""
        return self._engine.config.max_num_seqs

    @property
    def max_requests(self) -> int:
        """The most requests that may run and wait together."""
        return self._queue.max_requests

    def validate(self, request: GenerationRequest) -> ValidRequest:
        """A request that the engine can compute. Raises ContextOverflow and InvalidParameter."""
        return self._engine.validate(request)

    def submit(self, request: ValidRequest) -> RequestStream:
        """Queues a request. Raises QueueFull, and EngineDead if the engine has ended."""
        return self._queue.submit(request)

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters that requests may name."""
        return self._engine.adapters.by_name

    def load_adapter(self, name: str, folder: str, *, replaces: bool = False) -> None:
        """Blocks while files are read. Raises ConfigError for a name that is taken, CapacityError and kinds
        of CheckpointError."""
        self._engine.adapters.load(name, folder, replaces=replaces)

    def unload_adapter(self, name: str) -> None:
        """Requests that have the adapter go on. Raises ConfigError if there is none."""
        self._engine.adapters.unload(name)

    def snapshot(self) -> EngineSnapshot:
        """The engine's counters at this moment."""
        return snapshot_of(self._engine)

    @property
    def missing_machines(self) -> str:
        """The machines for which requests wait, by rank and state: "rank 1 is away"; "" if all are there.
        Anybody may read it: it has no addresses, and no reasons, which may name files."""
        return missing_machines(self._engine)

    def weights(self) -> WeightFacts:
        """What the weights are. `num_parameters` is 0 if it is not known."""
        return weights_of(self._engine)

    def plan(self) -> ServedPlanBody:
        """The memory plan."""
        return served_plan_of(self._engine)
