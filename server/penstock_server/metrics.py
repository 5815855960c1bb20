"""What GET /metrics exports: the engine's totals, and how long requests took as clients saw it.

Names and buckets are vLLM's, so that its dashboards work; what only Penstock has begins with
`penstock:`. Every series has the label `model_name`. Prometheus appends `_total` to counters.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from penstock.async_engine import AsyncEngine
from penstock.generation.request import RequestOutput
from penstock.metrics import Traffic

# fmt: off
_LATENCY_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5,
    10, 20, 40, 80, 160, 640, 2560,
)
_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)
# fmt: on
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_CHOICES = (1, 2, 5, 10, 20)


class RequestMetrics:
    """Histograms over requests. An AnswerTimer feeds them."""

    def __init__(self, model_name: str, engine: AsyncEngine) -> None:
        self._labels = {"model_name": model_name}
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(model_name, engine))
        ProcessCollector(registry=self.registry)
        self.latency = self._histogram("e2e_request_latency_seconds", "Whole request", _LATENCY_S)
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", _FIRST_TOKEN_S
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Between two outputs of an answer", _TOKEN_S
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean of a request after its first", _TOKEN_S
        )
        self.decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last", _LATENCY_S
        )
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt length", _TOKENS)
        self.generation_tokens = self._histogram("request_generation_tokens", "Answer length", _TOKENS)
        self.params_n = self._histogram("request_params_n", "Choices asked for", _CHOICES)
        self._success = Counter(
            "vllm:request_success",
            "Finished answers",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        parent = Histogram(f"vllm:{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
        return parent.labels(**self._labels)

    def count_finished(self, reason: str) -> None:
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def render(self) -> bytes:
        """All series in Prometheus' text format."""
        return generate_latest(self.registry)


class AnswerTimer:
    """Measures one answer, from the moment of its creation."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics
        self._arrival = time.monotonic()
        self._first: float | None = None
        self._last = self._arrival
        self._is_finished = False

    def record(self, output: RequestOutput) -> None:
        """Call it with each output as it comes."""
        now = time.monotonic()
        if output.token_ids:
            if self._first is None:
                self._first = now
                self._metrics.first_token.observe(now - self._arrival)
            else:
                self._metrics.inter_token.observe(now - self._last)
            self._last = now
        if output.finish_reason is not None:
            self._finish(output, output.finish_reason.value)

    def _finish(self, output: RequestOutput, reason: str) -> None:
        self._is_finished = True
        metrics = self._metrics
        metrics.count_finished(reason)
        metrics.latency.observe(time.monotonic() - self._arrival)
        metrics.prompt_tokens.observe(output.num_prompt_tokens)
        metrics.generation_tokens.observe(output.num_output_tokens)
        if self._first is not None:
            metrics.decode.observe(self._last - self._first)
            if output.num_output_tokens > 1:
                per_token_s = (self._last - self._first) / (output.num_output_tokens - 1)
                metrics.per_token.observe(per_token_s)

    def close(self, reason: str) -> None:
        """The answer ends here for `reason` ("abort", "error"), unless it has ended by itself."""
        if not self._is_finished:
            self._is_finished = True
            self._metrics.count_finished(reason)


class _EngineCollector(Collector):
    """Reads the engine's totals when asked. There are none before the engine is ready."""

    def __init__(self, model_name: str, engine: AsyncEngine) -> None:
        self._model_name = model_name
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        if self._engine.status.state != "ready":
            return
        now = self._engine.engine.metrics
        used = now.kv_blocks_used / now.kv_blocks_total if now.kv_blocks_total else 0.0
        yield self._gauge("vllm:num_requests_running", "Sequences in the batch", now.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences waiting", now.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Used part of the KV cache, 0 to 1", used)
        yield self._gauge("penstock:resident_layers", "Layers kept in memory", now.num_resident_layers)
        yield self._gauge("penstock:streamed_layers", "Layers read in each step", now.num_streamed_layers)
        yield self._gauge("penstock:pinned_bytes", "Memory pinned to feed a GPU", now.pinned_bytes)
        yield self._gauge("penstock:unpinned_bytes", "Memory that could not be pinned", now.unpinned_bytes)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        yield self._gauge("penstock:peak_rss_bytes", "Most memory this process ever had resident", peak)
        if now.step_seconds and now.floor_seconds:
            share = now.floor_seconds / now.step_seconds
            yield self._gauge(
                "penstock:floor_share", "Least possible step time / measured, since start", share
            )
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens computed", now.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated", now.generated_tokens),
            (
                "penstock:fast_forwarded_tokens",
                "Of them, forced by a grammar, without a step of their own",
                now.fast_forwarded_tokens,
            ),
            ("vllm:num_preemptions", "Sequences preempted", now.num_preemptions),
            ("penstock:steps", "Sweeps of the weights", now.num_steps),
            ("penstock:step_seconds", "Seconds in steps", now.step_seconds),
            ("penstock:stall_seconds", "Seconds waiting for layers", now.stall_seconds),
            (
                "penstock:floor_seconds",
                "Seconds that steps take at best, by measured rates",
                now.floor_seconds,
            ),
            ("penstock:predicted_seconds", "Seconds that the plan expected", now.predicted_seconds),
            (
                "penstock:streamed_bytes",
                "Bytes of weights read because a step needed them",
                now.streamed_bytes,
            ),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
        yield from self._links(now.links)

    def _links(self, links: dict[str, Traffic]) -> Iterable[Metric]:
        """Bytes / busy seconds is a link's rate."""
        labels = ["model_name", "link"]
        moved = CounterMetricFamily("penstock:link_bytes", "Bytes of weights over a link", labels=labels)
        busy = CounterMetricFamily("penstock:link_busy_seconds", "Seconds a link was in use", labels=labels)
        for name, traffic in links.items():
            moved.add_metric([self._model_name, name], traffic.num_bytes)
            busy.add_metric([self._model_name, name], traffic.busy_s)
        return moved, busy

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=["model_name"])
        gauge.add_metric([self._model_name], value)
        return gauge
