"""vLLM's names, so that its dashboards show us."""

from __future__ import annotations

import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fakes import FakeAsyncEngine, one_model
from penstock.errors import QueueFull
from penstock.generation.requests.request import RequestOutput
from penstock.generation.sequence import FinishReason
from penstock.metrics import StepStats
from penstock_server.telemetry.metrics import AnswerTimer, RequestMetrics

from ..conftest import MakeClient

#: All that vLLM's own Grafana dashboard asks for.
DASHBOARD = [
    *(
        f"vllm:{name}_{part}"
        for name in (
            "e2e_request_latency_seconds",
            "inter_token_latency_seconds",
            "request_time_per_output_token_seconds",
            "time_to_first_token_seconds",
        )
        for part in ("bucket", "sum", "count")
    ),
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:request_success_total",
]
#: What else dashboards of others ask vLLM for.
OTHERS = [
    "vllm:num_preemptions_total",
    "vllm:num_requests_waiting_by_reason",
    "vllm:request_num_preemptions_count",
    "vllm:request_prefill_kv_computed_tokens_sum",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:request_inference_time_seconds_sum",
    "vllm:request_params_n_sum",
    "vllm:request_params_max_tokens_sum",
    "vllm:iteration_tokens_total_bucket",
    "vllm:iteration_tokens_total_sum",
    "vllm:cache_config_info",
    "http_requests_total",
    "http_request_duration_seconds_bucket",
    "process_resident_memory_bytes",
    "python_info",
]


def samples(metrics: RequestMetrics) -> dict[str, float]:
    """Values by name; of a histogram with the label that tells them apart."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = sample.labels
            if family.name.startswith(("vllm:", "penstock:")):
                assert labels.pop("model_name") == "tiny"
                assert labels.pop("engine", "0") == "0"
            found[sample.name + "".join(f"/{value}" for value in labels.values())] = sample.value
    return found


@pytest.fixture
def metrics(engine: FakeAsyncEngine) -> RequestMetrics:
    fake: Any = engine
    return RequestMetrics(one_model(fake))


def output(num_tokens: int, finish: FinishReason | None = None, **more: int) -> RequestOutput:
    return RequestOutput("r", "x", (1,), (), 10, num_tokens, finish, started=time.monotonic(), **more)


def test_every_name_of_the_dashboard_moves_with_a_request(
    make_client: MakeClient, engine: FakeAsyncEngine
) -> None:
    """Not only is it there: what a request must change has changed."""
    client = make_client(engine)
    fields = {"prompt": "a", "max_tokens": 50}
    engine.model.metrics.record(StepStats(0.1, 9, 1, 1, 0, 0.0))
    assert client.post("/v1/completions", json=fields).status_code == 200
    text = client.get("/metrics").text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = max(sample.value, found.get(sample.name, 0.0))
            if family.name.startswith("vllm:"):
                assert sample.labels["engine"] == "0", sample
    assert set(DASHBOARD + OTHERS) <= found.keys()
    gauges = ("kv_cache_usage", "num_requests", "num_preemptions", "prefix_cache", "vllm:prompt_tokens_")
    for name in DASHBOARD + OTHERS:
        assert found[name] > 0 or any(part in name for part in gauges), name


def test_refusals_are_counted(metrics: RequestMetrics) -> None:
    metrics.count_rejected("overloaded")
    assert samples(metrics)["vllm:admission_rejections_total/overloaded"] == 1


def test_a_full_queue_is_a_refusal(make_client: MakeClient) -> None:
    def refuse(prompt: Any, params: Any) -> Any:
        raise QueueFull("full")

    client = make_client(FakeAsyncEngine(refuse))
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503
    assert 'vllm:admission_rejections_total{engine="0",model_name="tiny",reason="overloaded"} 1.0' in (
        client.get("/metrics").text
    )


def test_an_answers_times_and_lengths(metrics: RequestMetrics) -> None:
    timer = AnswerTimer(metrics.of("tiny"), time.monotonic())
    timer.record(output(1))
    timer.record(output(2))
    timer.record(output(3, FinishReason.LENGTH, num_cached_tokens=4, num_preemptions=2))
    timer.close("abort")  # has ended by itself
    found = samples(metrics)
    assert found["vllm:time_to_first_token_seconds_count"] == 1
    assert found["vllm:inter_token_latency_seconds_count"] == 2
    assert found["vllm:e2e_request_latency_seconds_count"] == 1
    for name in ("queue", "prefill", "decode", "inference"):
        assert found[f"vllm:request_{name}_time_seconds_count"] == 1
    parts = sum(found[f"vllm:request_{name}_time_seconds_sum"] for name in ("queue", "prefill"))
    assert parts == pytest.approx(found["vllm:time_to_first_token_seconds_sum"])
    assert found["vllm:request_prompt_tokens_sum"] == 10
    assert found["vllm:request_prefill_kv_computed_tokens_sum"] == 6
    assert found["vllm:request_num_preemptions_sum"] == 2
    assert found["vllm:request_generation_tokens_sum"] == 3
    assert found["vllm:request_success_total/length"] == 1
    assert found["vllm:request_success_total/abort"] == 0


def test_an_answer_that_was_cut_counts_as_such(metrics: RequestMetrics) -> None:
    timer = AnswerTimer(metrics.of("tiny"), time.monotonic())
    timer.record(output(1))
    timer.close("abort")
    timer.close("abort")
    found = samples(metrics)
    assert found["vllm:request_success_total/abort"] == 1
    assert found["vllm:e2e_request_latency_seconds_count"] == 0


def test_requests_are_measured(make_client: MakeClient, engine: FakeAsyncEngine) -> None:
    client = make_client(engine)
    client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 3})
    text = client.get("/metrics").text
    labels = 'engine="0",model_name="tiny"'
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 6.0' in text
    assert f"vllm:request_params_n_sum{{{labels}}} 3.0" in text
    assert f"vllm:request_max_num_generation_tokens_sum{{{labels}}} 7.0" in text
