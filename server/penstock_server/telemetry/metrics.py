"""The series of GET /metrics: times of requests as clients see them. The engine's totals (engine_metrics.py)
and those of HTTP (http_metrics.py) are added here.

Names, labels and buckets are vLLM's, so that its dashboards work. Series that only Penstock has begin with
`penstock:`. Prometheus appends `_total` to counters.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from penstock import FinishReason, RequestOutput, SamplingParams
from penstock.errors import PenstockError, QueueTimeout
from penstock_server.models.served_models import ServedModels
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


#: By their names: what the histograms over requests tell, and their buckets.
_HISTOGRAMS = {
    "e2e_request_latency_seconds": ("Seconds of a whole request", _LATENCY_S),
    "time_to_first_token_seconds": ("From arrival to the first token", _FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("Between two outputs of an answer", _TOKEN_S),
    "request_time_per_output_token_seconds": ("Mean per token of a request, after its first", _TOKEN_S),
    "request_queue_time_seconds": ("From arrival to the first step", _LATENCY_S),
    "request_prefill_time_seconds": ("From the first step to the first token", _LATENCY_S),
    "request_decode_time_seconds": ("From the first token to the last", _LATENCY_S),
    "request_inference_time_seconds": ("From the first step to the last token", _LATENCY_S),
    "request_prompt_tokens": ("Prompt length", _TOKENS),
    "request_generation_tokens": ("Answer length", _TOKENS),
    "request_max_num_generation_tokens": ("Longest of a request's answers", _TOKENS),
    "request_prefill_kv_computed_tokens": ("Prompt length without what was cached", _TOKENS),
    "request_num_preemptions": ("Preemptions of an answer", _PREEMPTIONS),
    "request_params_n": ("Choices asked for", _CHOICES),
    "request_params_max_tokens": ("max_tokens asked for", _TOKENS),
}


class RequestMetrics:
    """The registry of all series, and the histograms over requests of each model."""

    def __init__(self, models: ServedModels) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(models))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.http = HttpMetrics(self.registry)
        names = [*vllm_labels("")]
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, names, registry=self.registry, buckets=buckets)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._success = self._counter("request_success", "Finished answers", "finished_reason")
        self._rejections = self._counter("admission_rejections", "Requests that were not let in", "reason")
        #: By the first names of the models.
        self._of = {model.name: self._of_model(model.name) for model in models.models}
        self._first = models.models[0].name
        models.count_refused = lambda name, reason: self.of(name).count_rejected(reason)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"vllm:{name}", text, [*vllm_labels(""), label], registry=self.registry)

    def _of_model(self, name: str) -> ModelMetrics:
        return ModelMetrics(name, self._histograms, self._success, self._rejections)

    def of(self, model_name: str) -> ModelMetrics:
        """The series of a model, by its first name."""
        return self._of[model_name]

    def count_rejected(self, reason: str) -> None:
        """Counts a request that was refused before anybody asked for its model: it counts for the first.
        reason: the code of the error that the client gets."""
        self._of[self._first].count_rejected(reason)

    def render(self) -> bytes:
        """All series in Prometheus' text format."""
        return generate_latest(self.registry)


class ModelMetrics:
    """Histograms over the requests to one model. An AnswerTimer adds to them."""

    def __init__(
        self, model_name: str, histograms: Mapping[str, Histogram], success: Counter, rejections: Counter
    ) -> None:
        self._labels = vllm_labels(model_name)

        def own(name: str) -> Histogram:
            return histograms[name].labels(**self._labels)

        self.latency = own("e2e_request_latency_seconds")
        self.first_token = own("time_to_first_token_seconds")
        self.inter_token = own("inter_token_latency_seconds")
        self.per_token = own("request_time_per_output_token_seconds")
        self.queue = own("request_queue_time_seconds")
        self.prefill = own("request_prefill_time_seconds")
        self.decode = own("request_decode_time_seconds")
        self.inference = own("request_inference_time_seconds")
        self.prompt_tokens = own("request_prompt_tokens")
        self.generation_tokens = own("request_generation_tokens")
        self.max_generation_tokens = own("request_max_num_generation_tokens")
        self.computed_tokens = own("request_prefill_kv_computed_tokens")
        self.preemptions = own("request_num_preemptions")
        self._params_n = own("request_params_n")
        self._params_max_tokens = own("request_params_max_tokens")
        self._success = success
        self._rejections = rejections
        for reason in FinishReason:
            success.labels(**self._labels, finished_reason=reason.value)

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


class AnswerTimer:
    """Measures the times of one answer, and notes them in the request's RequestInfo."""

    def __init__(self, metrics: ModelMetrics, arrival: float) -> None:
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
