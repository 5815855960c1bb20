"""The engine's totals under vLLM's names, and its own under ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fakes import FakeAsyncEngine, one_model
from penstock.async_engine import EngineStatus
from penstock.metrics import (
    KVDiskReads,
    KVDiskStats,
    KVEventStats,
    KVSpillStats,
    Preemptions,
    StepStats,
    Traffic,
)
from penstock.spec import UnitKey
from penstock.weights.tiers.use_counts import UseCounts
from penstock_server.telemetry.metrics import RequestMetrics

from .test_metrics import samples


@pytest.fixture
def metrics(engine: FakeAsyncEngine) -> RequestMetrics:
    fake: Any = engine
    return RequestMetrics(one_model(fake))


def test_totals_of_the_engine(metrics: RequestMetrics, engine: FakeAsyncEngine) -> None:
    totals = engine.model.metrics
    totals.num_steps, totals.step_seconds, totals.streamed_bytes = 3, 1.5, 2**30
    totals.fast_forwarded_tokens = 7
    totals.draft_tokens, totals.accepted_tokens = 9, 4
    for num_right in (0, 1, 3):
        totals.record_chain(num_right)
    totals.prompt_tokens, totals.generated_tokens, totals.num_preemptions = 40, 50, 6
    totals.num_running, totals.num_waiting = 2, 1
    totals.prefix_cache_queries, totals.prefix_cache_hits = 40, 16
    totals.expert_queries, totals.expert_hits = 60, 45
    totals.kv_blocks_used, totals.kv_blocks_total = 5, 20
    found = samples(metrics)
    assert found["penstock:steps_total"] == 3
    assert found["penstock:step_seconds_total"] == 1.5
    assert found["penstock:streamed_bytes_total"] == 2**30
    assert found["vllm:prompt_tokens_total"] == 40
    assert found["vllm:generation_tokens_total"] == 50
    assert found["penstock:fast_forwarded_tokens_total"] == 7
    assert found["vllm:spec_decode_num_drafts_total"] == 3
    assert found["vllm:spec_decode_num_draft_tokens_total"] == 9
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == 4
    places = [found[f"vllm:spec_decode_num_accepted_tokens_per_pos_total/{place}"] for place in range(4)]
    assert places == [2, 1, 1, 0]
    assert found["vllm:num_preemptions_total"] == 6
    assert found["vllm:prefix_cache_queries_total"] == 40 and found["vllm:prefix_cache_hits_total"] == 16
    assert (found["penstock:expert_queries_total"], found["penstock:expert_hits_total"]) == (60, 45)
    assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (2, 1)
    assert found["vllm:num_requests_waiting_by_reason/capacity"] == 1
    assert found["vllm:num_requests_waiting_by_reason/deferred"] == 0
    assert found["vllm:kv_cache_usage_perc"] == 0.25
    assert "penstock:floor_share" not in found  # nothing was measured


def test_keys_and_values_on_disk(metrics: RequestMetrics, engine: FakeAsyncEngine) -> None:
    totals = engine.model.metrics
    totals.prefix_cache_hits = 80
    assert samples(metrics)["penstock:kv_hit_tokens_total/memory"] == 80
    reads = KVDiskReads(num_blocks=3, num_states=2, num_tokens=48, read_s=0.5, saved_s=7.5)
    totals.kv_disk = KVDiskStats(1000, 300, 3, True, 5, 500, 6, 7, 8, 400, reads)
    found = samples(metrics)
    tiers = [found[f"penstock:kv_hit_tokens_total/{tier}"] for tier in ("memory", "disk")]
    assert tiers == [32, 48]
    assert (found["penstock:kv_disk_bytes"], found["penstock:kv_disk_limit_bytes"]) == (300, 1000)
    totals_of = {name: found[f"penstock:kv_disk_{name}_total"] for name in (
        "read_bytes", "written_bytes", "read_seconds", "saved_seconds", "missed_blocks", "failed_writes",
        "damaged_blocks", "read_states",
    )}  # fmt: skip
    assert [*totals_of.values()] == [400, 500, 0.5, 7.5, 6, 7, 8, 2]


def test_keys_and_values_on_the_host(metrics: RequestMetrics, engine: FakeAsyncEngine) -> None:
    totals = engine.model.metrics
    totals.prefix_cache_hits = 100
    totals.kv_disk = KVDiskStats(reads=KVDiskReads(num_tokens=16))
    reads = KVDiskReads(num_blocks=2, num_tokens=32, read_s=0.25, saved_s=1.5)
    totals.kv_host = KVDiskStats(1000, 300, 3, True, 5, 500, 6, 0, 0, 400, reads)
    found = samples(metrics)
    tiers = [found[f"penstock:kv_hit_tokens_total/{tier}"] for tier in ("memory", "host", "disk")]
    assert tiers == [52, 32, 16]
    assert (found["penstock:kv_host_bytes"], found["penstock:kv_host_limit_bytes"]) == (300, 1000)
    names = ("read_bytes", "written_bytes", "read_seconds", "saved_seconds", "missed_blocks")
    assert [found[f"penstock:kv_host_{name}_total"] for name in names] == [400, 500, 0.25, 1.5, 6]


def test_preemptions_by_kind(metrics: RequestMetrics, engine: FakeAsyncEngine) -> None:
    engine.model.metrics.preemptions = Preemptions(3, 2, 480, 7.5, 0.25)
    found = samples(metrics)
    assert [found[f"penstock:preemptions_total/{kind}"] for kind in ("moved", "recomputed")] == [3, 2]
    names = ("moved_tokens", "saved_seconds", "write_seconds")
    assert [found[f"penstock:preemption_{name}_total"] for name in names] == [480, 7.5, 0.25]


def test_keys_and_values_beyond_the_memory(metrics: RequestMetrics, engine: FakeAsyncEngine) -> None:
    assert "penstock:kv_spill_bytes" not in samples(metrics)
    engine.model.metrics.kv_spill = KVSpillStats(3, 300, 1000, 50, 70, 0.25)
    found = samples(metrics)
    names = ("bytes", *(f"{name}_total" for name in ("read_bytes", "written_bytes", "attended_bytes")))
    assert [found[f"penstock:kv_spill_{name}"] for name in names] == [300, 1000, 50, 70]
    assert found["penstock:kv_spill_wait_seconds_total"] == 0.25


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


def test_experts(metrics: RequestMetrics, engine: FakeAsyncEngine) -> None:
    """Of a mixture with two layers, the first without experts."""
    uses = UseCounts[UnitKey](1)
    uses.add([UnitKey("decoder", 1, 3)] * 3 + [UnitKey("decoder", 1, 0)])
    policy = SimpleNamespace(keys=[UnitKey("decoder", 1, 3)], num_pinned=1)
    tier = SimpleNamespace(
        num_slots=2, num_units={("decoder", 0): 0, ("decoder", 1): 4}, num_arrived={("decoder", 1): 5},
        policy=policy, uses=uses,
    )  # fmt: skip
    engine.model.streamer.tiers.nearest_experts = tier
    engine.model.streamer.layer_places = {("decoder", 0): 0, ("decoder", 1): 1}
    totals = engine.model.metrics
    totals.expert_queries, totals.expert_hits, totals.step_tokens = 60, 45, 20
    totals.links = {"disk, experts": Traffic(4000, 1.0)}
    found = samples(metrics)
    assert found["penstock:expert_hit_rate"] == 0.75 and found["penstock:expert_bytes_per_token"] == 200
    assert (found["penstock:expert_slots"], found["penstock:pinned_experts"]) == (2, 1)
    text = metrics.render().decode()
    assert 'penstock:hot_expert_share{expert="3",layer="1",model_name="tiny"} 0.75' in text


def test_nothing_of_the_engine_while_it_loads(metrics: RequestMetrics, engine: FakeAsyncEngine) -> None:
    engine.status = EngineStatus("loading", 0, 4)
    found = samples(metrics)
    assert "vllm:num_requests_running" not in found
    assert "vllm:time_to_first_token_seconds_count" in found


def test_tokens_per_step_are_a_histogram(metrics: RequestMetrics, engine: FakeAsyncEngine) -> None:
    for num_tokens in (1, 1, 8, 9, 20_000):
        engine.model.metrics.record(StepStats(0.1, num_tokens, 1, 1, 0, 0.0))
    found = samples(metrics)
    name = "vllm:iteration_tokens_total"
    assert [found[f"{name}_bucket/{bound}"] for bound in ("1.0", "8.0", "16.0", "16384.0", "+Inf")] == [
        2, 3, 4, 4, 5,
    ]  # fmt: skip
    assert (found[f"{name}_count"], found[f"{name}_sum"]) == (5, 20_019)


def test_the_cache_is_described(metrics: RequestMetrics, engine: FakeAsyncEngine) -> None:
    engine.model.metrics.kv_blocks_total = 20
    families = text_string_to_metric_families(metrics.render().decode())
    (sample,) = next(family.samples for family in families if family.name == "vllm:cache_config_info")
    facts = {"block_size": "16", "cache_dtype": "float16", "num_gpu_blocks": "20"}
    # 20 blocks of 16 tokens, and the model's longest sequence has 1000
    facts |= {"kv_cache_size_tokens": "320", "kv_cache_max_concurrency": "0.32"}
    assert sample.value == 1 and sample.labels == facts | {"engine": "0", "model_name": "tiny"}


def test_events_for_routers(metrics: RequestMetrics, engine: FakeAsyncEngine) -> None:
    assert "penstock:kv_events_sent_batches_total" not in samples(metrics)
    engine.model.metrics.kv_events = KVEventStats(3, 300, 1)
    found = samples(metrics)
    names = ("sent_batches", "sent_bytes", "dropped_batches")
    assert [found[f"penstock:kv_events_{name}_total"] for name in names] == [3, 300, 1]
