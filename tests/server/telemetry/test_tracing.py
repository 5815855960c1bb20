"""Spans as a collector gets them, over HTTP."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.testclient import TestClient

from fakes import FakeAsyncEngine
from penstock.errors import ConfigError, StepFailed
from penstock_server.api.app import create_app
from penstock_server.facade.engine import ServedEngine
from penstock_server.settings.settings import Settings
from penstock_server.telemetry.tracing import RequestTracer


class Collector:
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.headers: list[Any] = []
        self._requests: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                import gzip

                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector._requests.append(ExportTraceServiceRequest.FromString(body))
                collector.headers.append(dict(self.headers))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True)
        self._thread.start()

    @property
    def resources(self) -> list[Any]:
        return [resource for request in self._requests for resource in request.resource_spans]

    @property
    def spans(self) -> list[Any]:
        scopes = [scope for resource in self.resources for scope in resource.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def client_of(collector: Collector, engine: FakeAsyncEngine) -> TestClient:
    fake: Any = engine
    settings = Settings(model="tiny", otlp_traces_endpoint=collector.url)
    return TestClient(
        create_app(ServedEngine(fake), settings), raise_server_exceptions=False, base_url="http://localhost"
    )


def values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def test_a_span_with_figures_in_the_clients_trace(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=mine")
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with client_of(collector, FakeAsyncEngine()) as client:
        client.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "secret"}], "n": 2},
            headers={"traceparent": f"00-{trace_id}-{parent_id}-01", "X-Request-Id": "mine"},
        )
    (span,) = collector.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace_id, parent_id)
    assert span.name == "POST /v1/chat/completions"
    assert span.end_time_unix_nano > span.start_time_unix_nano > 0
    found = values(span.attributes)
    assert found["http.response.status_code"] == 200
    assert found["gen_ai.operation.name"] == "chat" and found["gen_ai.request.model"] == "tiny"
    assert found["gen_ai.request.id"] == "mine" and found["gen_ai.request.choice.count"] == 2
    assert found["gen_ai.usage.input_tokens"] == len(b"user: secret\nassistant:")
    assert found["gen_ai.usage.output_tokens"] == 14
    assert 0 <= found["gen_ai.latency.time_in_queue"] <= found["gen_ai.latency.time_to_first_token"]
    assert "secret" not in str(collector.spans) and "Hello" not in str(collector.spans)
    assert values(collector.resources[0].resource.attributes)["service.name"] == "penstock"
    assert collector.headers[0]["x-tenant"] == "mine"


def test_errors_and_probes(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "other")
    engine = FakeAsyncEngine(lambda prompt, params: [StepFailed([], "the disk is gone")])
    with client_of(collector, engine) as client:
        client.get("/health")
        client.get("/v1/models/tiny")
        client.post("/v1/completions", json={"prompt": "x"})
        client.get("/v1/nothing/of/that/name")
    names = [(span.name, span.status.code) for span in collector.spans]
    assert names == [("GET /v1/models/{model:path}", 0), ("POST /v1/completions", 2), ("GET", 0)]
    assert values(collector.resources[0].resource.attributes)["service.name"] == "other"


def test_a_trace_that_is_not_sampled_is_left_out(collector: Collector) -> None:
    with client_of(collector, FakeAsyncEngine()) as client:
        header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
        client.get("/v1/models", headers={"traceparent": header})
    assert not collector.spans


def test_without_the_extra_the_flag_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    importing = builtins.__import__

    def refuse(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return importing(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"penstock-llm\[otel\]"):
        RequestTracer("http://localhost:4318/v1/traces", "tiny")
