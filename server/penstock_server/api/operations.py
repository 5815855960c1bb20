"""Routes for operators and their tools: health, version, load, metrics, plan, statistics.

No route here waits for the engine's thread. /health, /ping and /version need no API key. /health/live says
whether a restart would help; /health and /health/ready say whether requests can be answered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from penstock_server import __version__
from penstock_server.models.served_models import ServedModels
from penstock_server.protocol.answer_bodies import Health, Version
from penstock_server.protocol.engine_bodies import ServedPlanBody, StatsBody
from penstock_server.protocol.errors import RETRY_AFTER_S, ErrorBody
from penstock_server.protocol.paths import LOAD_PATH, METRICS_PATH, STATS_PATH
from penstock_server.routing.checks import loaded_engine
from penstock_server.telemetry.metrics import RequestMetrics

_NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {"model": Health, "description": "loading, waiting, failing, stuck, draining, dead or stopped"}
}


class OperationRoutes:
    def __init__(
        self,
        models: ServedModels,
        metrics: RequestMetrics,
        is_draining: Callable[[], bool],
        num_open: Callable[[], int],
    ) -> None:
        """num_open: the number of requests that are being answered."""
        self._models = models
        self._metrics = metrics
        self._is_draining = is_draining
        self._num_open = num_open

    def router(self) -> APIRouter:
        router = APIRouter(tags=["operations"])
        for path in ("/health", "/health/ready", "/ping"):
            router.get(path, response_model=Health, responses=_NOT_READY)(self.ready)
        router.get("/health/live", response_model=Health, responses=_NOT_READY)(self.live)
        router.get("/version")(self.version)
        router.get(LOAD_PATH)(self.load)
        router.get(METRICS_PATH, response_class=Response)(self.metrics)
        refusals: dict[int | str, dict[str, Any]] = {code: {"model": ErrorBody} for code in (401, 404, 503)}
        router.get("/v1/plan", responses=refusals)(self.plan)
        router.get(STATS_PATH, responses=refusals)(self.stats)
        return router

    async def ready(self) -> Response:
        """200 if requests can be answered now, else 503: while the model loads, with the progress, while
        requests wait for another machine, with its name, while a step hangs, and for half a minute after a
        step that failed, unless one is computed before."""
        health = self._health()
        return _answer(health, is_good=health.status == "ok")

    async def live(self) -> Response:
        """503 if only a restart can help, else 200. A disk that hangs or fails does so after a
        restart, too."""
        health = self._health()
        return _answer(health, is_good=health.status not in ("dead", "stopped"))

    async def version(self) -> Version:
        return Version(version=__version__)

    async def load(self) -> dict[str, int]:
        """vLLM's route: the number of requests that are being answered, including those that wait."""
        return {"server_load": self._num_open()}

    async def metrics(self) -> Response:
        """Counters and histograms in Prometheus' text format."""
        return Response(self._metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def plan(self, model: str | None = None) -> ServedPlanBody:
        """The memory plan (bytes, homes of layers, budgets) and the time that a step of one token should
        take. 503 while the model loads. `model`: one of several; without it, the one that was used last."""
        return loaded_engine(self._models, model).plan()

    async def stats(self, model: str | None = None) -> StatsBody:
        """The engine's totals and gauges, the last step, and the layer that is being computed (null: none).
        `time_s` is a clock: the rate of a total is its difference between two answers, divided by the
        difference of `time_s`. 503 while the model loads. `model`: as for /v1/plan."""
        return loaded_engine(self._models, model).snapshot().stats

    def _health(self) -> Health:
        status = self._models.status
        if status.state == "ready":
            if self._is_draining():
                return Health(status="draining")
            if missing := self._models.missing_machines:
                return Health(status="waiting", message=missing)
            if trouble := self._models.trouble:
                return Health(status=trouble.kind, message=trouble.message)
            return Health(status="ok")
        if status.state == "loading":
            return Health(
                status="loading",
                loaded_layers=status.loaded_layers,
                total_layers=status.total_layers,
            )
        return Health(status=status.state)


def _answer(health: Health, is_good: bool) -> Response:
    headers = {} if is_good else {"Retry-After": str(RETRY_AFTER_S)}
    body = health.model_dump(exclude_none=True)
    return JSONResponse(body, 200 if is_good else 503, headers)
