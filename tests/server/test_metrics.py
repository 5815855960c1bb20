"""vLLM's names, so that its dashboards show us."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fakes import FakeAsyncEngine
from penstock.async_engine import EngineStatus
from penstock.generation.request import RequestOutput
from penstock.generation.sequence import FinishReason
from penstock.metrics import Traffic
from penstock_server.metrics import AnswerTimer, RequestMetrics

from .conftest import MakeClient

#: What vLLM's own Grafana dashboard asks for and we have.
DASHBOARD = [
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_prompt_tokens_bucket",
]


def samples(metrics: RequestMetrics) -> dict[str, float]:
    """Values by name; of a histogram with the label that tells them apart."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = sample.labels
            assert family.name.startswith("process") or labels.pop("model_name") == "tiny"
            found[sample.name + "".join(f"/{value}" for value in labels.values())] = sample.value
    return found


@pytest.fixture
def metrics(engine: FakeAsyncEngine) -> RequestMetrics:
    fake: Any = engine
    return RequestMetrics("tiny", fake)


def output(num_tokens: int, finish: FinishReason | None = None) -> RequestOutput:
    return RequestOutput("r", "x", (1,), (), 10, num_tokens, finish)


def test_names_are_vllms(metrics: RequestMetrics) -> None:
    found = {name.partition("/")[0] for name in samples(metrics)}
    assert set(DASHBOARD) <= found


def test_totals_of_the_engine(metrics: RequestMetrics, engine: FakeAsyncEngine) -> None:
    totals = engine.model.metrics
    totals.num_steps, totals.step_seconds, totals.streamed_bytes = 3, 1.5, 2**30
    totals.prompt_tokens, totals.generated_tokens, totals.num_preemptions = 40, 50, 6
    totals.fast_forwarded_tokens = 7
    totals.num_running, totals.num_waiting = 2, 1
    totals.kv_blocks_used, totals.kv_blocks_total = 5, 20
    found = samples(metrics)
    assert found["penstock:steps_total"] == 3
    assert found["penstock:step_seconds_total"] == 1.5
    assert found["penstock:streamed_bytes_total"] == 2**30
    assert found["vllm:prompt_tokens_total"] == 40
    assert found["vllm:generation_tokens_total"] == 50
    assert found["penstock:fast_forwarded_tokens_total"] == 7
    assert found["vllm:num_preemptions_total"] == 6
    assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (2, 1)
    assert found["vllm:kv_cache_usage_perc"] == 0.25
    assert "penstock:floor_share" not in found  # nothing was measured


def test_what_was_reached_of_what_can_be(metrics: RequestMetrics, engine: FakeAsyncEngine) -> None:
    totals = engine.model.metrics
    totals.step_seconds, totals.floor_seconds, totals.predicted_seconds = 2.0, 1.5, 1.75
    totals.links = {"disk": Traffic(4 * 10**9, 1.0), "host to device": Traffic(10**9, 0.5)}
    totals.unpinned_bytes, totals.pinned_bytes = 7, 8
    found = samples(metrics)
    assert found["penstock:floor_share"] == 0.75 and found["penstock:unpinned_bytes"] == 7
    assert found["penstock:pinned_bytes"] == 8
    assert found["penstock:peak_rss_bytes"] > 2**20
    assert found["penstock:predicted_seconds_total"] == 1.75
    assert found["penstock:link_bytes_total/disk"] == 4e9
    assert found["penstock:link_busy_seconds_total/host to device"] == 0.5


def test_nothing_of_the_engine_while_it_loads(metrics: RequestMetrics, engine: FakeAsyncEngine) -> None:
    engine.status = EngineStatus("loading", 0, 4)
    found = samples(metrics)
    assert "vllm:num_requests_running" not in found
    assert "vllm:time_to_first_token_seconds_count" in found


def test_an_answers_times_and_lengths(metrics: RequestMetrics) -> None:
    timer = AnswerTimer(metrics)
    timer.record(output(1))
    timer.record(output(2))
    timer.record(output(3, FinishReason.LENGTH))
    timer.close("abort")  # has ended by itself
    found = samples(metrics)
    assert found["vllm:time_to_first_token_seconds_count"] == 1
    assert found["vllm:inter_token_latency_seconds_count"] == 2
    assert found["vllm:e2e_request_latency_seconds_count"] == 1
    assert found["vllm:request_prompt_tokens_sum"] == 10
    assert found["vllm:request_generation_tokens_sum"] == 3
    assert found["vllm:request_success_total/length"] == 1
    assert "vllm:request_success_total/abort" not in found


def test_an_answer_that_was_cut_counts_as_such(metrics: RequestMetrics) -> None:
    timer = AnswerTimer(metrics)
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
    assert 'vllm:request_success_total{finished_reason="stop",model_name="tiny"} 6.0' in text
    assert 'vllm:request_params_n_sum{model_name="tiny"} 3.0' in text
