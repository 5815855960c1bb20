"""Counts of HTTP requests, under the names of FastAPI's usual instrumentation, which vLLM has as well.

The values of labels are bounded: clients can't make new series, whatever they send. `handler` is a route and
not a path ("none" for a path without a route), `status` a class such as "2xx".
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import Scope

# fmt: off
_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 480, 960, 1920, 7680,
)
# fmt: on
_METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE")


class HttpMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests", "Requests by method, status and route", ["method", "status", "handler"],
            registry=registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "http_request_duration_seconds", "From a request to the end of its answer", ["method", "handler"],
            registry=registry, buckets=_SECONDS,
        )  # fmt: skip

    def observe(self, scope: Scope, status: int, duration_s: float) -> None:
        """Counts a request that is over. status 0: the request got no answer."""
        method = scope["method"] if scope["method"] in _METHODS else "other"
        handler = route_of(scope) or "none"
        self._requests.labels(method, f"{status // 100}xx" if status else "none", handler).inc()
        self._seconds.labels(method, handler).observe(duration_s)


def route_of(scope: Scope) -> str | None:
    """The path of a request's route, with placeholders; None without a route. A route that exists with and
    without /v1 does not know by which path it was asked, so that /v1 is added here."""
    path: str | None = getattr(scope.get("route"), "path", None)
    if path is None:
        return None
    has_prefix = scope["path"].startswith("/v1/") and not path.startswith("/v1/")
    return "/v1" + path if has_prefix else path
