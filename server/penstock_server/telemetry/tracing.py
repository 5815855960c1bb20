"""A span per request for OpenTelemetry, named by its conventions for HTTP and generative AI. Spans have
neither prompts nor answers.

Tracing is an extra: `pip install 'penstock-llm[otel]'`. The library's own OTEL_* variables set everything
that has no flag: OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER and so on."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from penstock.errors import ConfigError
from penstock_server.telemetry.http_metrics import route_of
from penstock_server.telemetry.request_info import RequestInfo

#: Seconds for the last spans to reach the collector when the server ends.
_CLOSE_TIMEOUT_S = 5.0

_OPERATIONS = {
    "/chat/completions": "chat",
    "/completions": "text_completion",
    "/fill": "text_completion",
    "/responses": "chat",
}


class RequestTracer:
    """Sends spans to a collector, on a thread of OpenTelemetry's library."""

    def __init__(self, endpoint: str, model_name: str) -> None:
        """endpoint: the address for OTLP over HTTP, such as http://localhost:4318/v1/traces. Raises
        ConfigError if the extra is not installed."""
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ConfigError(
                "--otlp-traces-endpoint needs a library that is not installed: "
                "pip install 'penstock-llm[otel]'"
            ) from None
        own_name = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "penstock"}
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        self._provider = TracerProvider(resource=Resource.create(own_name), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("penstock")
        self._model_name = model_name

    def record(self, scope: Scope, status: int, duration_s: float, info: RequestInfo) -> None:
        """Records the span of a request that is over. If the client sent a traceparent, the span is part of
        the client's trace."""
        end = time.time_ns()
        trace, route = self._trace, route_of(scope)
        span = self._tracer.start_span(
            f"{scope['method']} {route}" if route else str(scope["method"]),
            context=self._propagator.extract(dict(Headers(scope=scope))),
            kind=trace.SpanKind.SERVER,
            start_time=end - int(duration_s * 1e9),
            attributes=_attributes(scope, status, info) | self._model(info),
        )
        if status >= 500:
            span.set_status(trace.StatusCode.ERROR)
        span.end(end)

    def _model(self, info: RequestInfo) -> dict[str, Any]:
        return {"gen_ai.request.model": info.model or self._model_name} if info.answers else {}

    def close(self) -> None:
        """Sends the last spans. A collector that does not respond is waited for _CLOSE_TIMEOUT_S only."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)


def _attributes(scope: Scope, status: int, info: RequestInfo) -> dict[str, Any]:
    found: dict[str, Any] = {
        "http.request.method": scope["method"],
        "url.path": scope["path"],
        "http.response.status_code": status,
        "gen_ai.request.id": info.request_id,
    }
    if not info.answers:
        return found
    timings = info.timings()
    operation = _OPERATIONS.get(scope["path"].removeprefix("/v1"), "text_completion")
    figures = {
        "gen_ai.operation.name": operation,
        "gen_ai.request.choice.count": len(info.answers),
        "gen_ai.usage.input_tokens": info.num_prompt_tokens,
        "gen_ai.usage.output_tokens": info.num_output_tokens,
        "gen_ai.latency.time_in_queue": timings.get("queue_s"),
        "gen_ai.latency.time_to_first_token": timings.get("first_token_s"),
    }
    return found | {name: value for name, value in figures.items() if value is not None}
