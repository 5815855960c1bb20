"""The series of GET /metrics: times of requests as clients see them. The engine's totals (engine_metrics.py)
and those of HTTP (http_metrics.py) are added here.

Names, labels and buckets are vLLM's, so that its dashboards work. Series that only Penstock has begin with
`penstock:`. Prometheus appends `_total` to counters.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from penstock import FinishReason, RequestOutput, SamplingParams
from penstock.errors import PenstockError, QueueTimeout
from penstock_server.facade.engine import ServedEngine
from penstock_server.telemetry.engine_metrics import EngineCollector, vllm_labels
from penstock_server.telemetry.http_metrics import HttpMetrics
from penstock_server.telemetry.request_info import AnswerTimes, current_request

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
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


class RequestMetrics:
    """Histograms over requests. An AnswerTimer adds to them."""

    def __init__(self, model_name: str, engine: ServedEngine) -> None:
        self._labels = vllm_labels(model_name)
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(model_name, engine))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.http = HttpMetrics(self.registry)
        self.latency = self._histogram(
            "e2e_request_latency_seconds", "Seconds of a whole request", _LATENCY_S
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", _FIRST_TOKEN_S
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Between two outputs of an answer", _TOKEN_S
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean per token of a request, after its first", _TOKEN_S
        )
        self.queue = self._histogram(
            "request_queue_time_seconds", "From arrival to the first step", _LATENCY_S
        )
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "From the first step to the first token", _LATENCY_S
        )
        self.decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last", _LATENCY_S
        )
        self.inference = self._histogram(
            "request_inference_time_seconds", "From the first step to the last token", _LATENCY_S
        )
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt length", _TOKENS)
        self.generation_tokens = self._histogram("request_generation_tokens", "Answer length", _TOKENS)
        self.max_generation_tokens = self._histogram(
            "request_max_num_generation_tokens", "Longest of a request's answers", _TOKENS
        )
        self.computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt length without what was cached", _TOKENS
        )
        self.preemptions = self._histogram(
            "request_num_preemptions", "Preemptions of an answer", _PREEMPTIONS
        )
        self._params_n = self._histogram("request_params_n", "Choices asked for", _CHOICES)
        self._params_max_tokens = self._histogram(
            "request_params_max_tokens", "max_tokens asked for", _TOKENS
        )
        self._success = self._counter("request_success", "Finished answers", "finished_reason")
        for reason in FinishReason:
            self._success.labels(**self._labels, finished_reason=reason.value)
        self._rejections = self._counter("admission_rejections", "Requests that were not let in", "reason")

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        parent = Histogram(f"vllm:{name}", text, [*self._labels], registry=self.registry, buckets=buckets)
        return parent.labels(**self._labels)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"vllm:{name}", text, [*self._labels, label], registry=self.registry)

    def observe_params(self, params: Sequence[SamplingParams]) -> None:
        """Counts what a request asks for. params: one element for each choice."""
        self._params_n.observe(len(params))
        if params and params[0].max_tokens is not None:
            self._params_max_tokens.observe(params[0].max_tokens)

    def count_finished(self, reason: str) -> None:
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def count_rejected(self, reason: str) -> None:
        """reason: the code of the error that the client gets."""
        self._rejections.labels(**self._labels, reason=reason).inc()

    def render(self) -> bytes:
        """All series in Prometheus' text format."""
        return generate_latest(self.registry)


class AnswerTimer:
    """Measures the times of one answer, and notes them in the request's RequestInfo."""

    def __init__(self, metrics: RequestMetrics, arrival: float) -> None:
        """arrival: the time at which the engine was asked, by the monotonic clock."""
        self._metrics = metrics
        self._times = AnswerTimes(arrival)
        self._is_finished = False
        if (request := current_request.get()) is not None:
            request.answers.append(self._times)

    def record(self, output: RequestOutput) -> None:
        """Notes an output at the moment when it comes."""
        now, times = time.monotonic(), self._times
        times.started = output.started
        times.num_output_tokens = output.num_output_tokens
        if output.token_ids:
            if times.first is None or times.last is None:
                times.first = now
                self._metrics.first_token.observe(now - times.arrival)
            else:
                self._metrics.inter_token.observe(now - times.last)
            times.last = now
        if output.finish_reason is not None:
            self._finish(output, output.finish_reason.value)

    def _finish(self, output: RequestOutput, reason: str) -> None:
        self._is_finished = True
        metrics, times = self._metrics, self._times
        metrics.count_finished(reason)
        metrics.latency.observe(time.monotonic() - times.arrival)
        metrics.prompt_tokens.observe(output.num_prompt_tokens)
        metrics.computed_tokens.observe(output.num_prompt_tokens - output.num_cached_tokens)
        metrics.preemptions.observe(output.num_preemptions)
        metrics.generation_tokens.observe(output.num_output_tokens)
        if times.queue_s is not None:
            metrics.queue.observe(times.queue_s)
        if times.first is not None and times.last is not None:
            if times.started is not None:
                metrics.prefill.observe(times.first - times.started)
                metrics.inference.observe(times.last - times.started)
            metrics.decode.observe(times.last - times.first)
            if output.num_output_tokens > 1:
                metrics.per_token.observe((times.last - times.first) / (output.num_output_tokens - 1))

    def fail(self, error: PenstockError) -> None:
        """Notes that the answer ends with an error."""
        if isinstance(error, QueueTimeout):
            self._metrics.count_rejected("queue_timeout")
        self.close("error")

    def close(self, reason: str) -> None:
        """Notes that the answer ends for `reason` ("abort", "error"), unless it has ended already."""
        if not self._is_finished:
            self._is_finished = True
            self._metrics.count_finished(reason)
