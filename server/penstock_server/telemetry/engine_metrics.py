"""The engine's totals as Prometheus' series, read at each request of /metrics."""

from __future__ import annotations

import resource
import time
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from penstock.metrics import Series, Traffic, series_of
from penstock_server.facade.snapshot import EngineSnapshot
from penstock_server.models.pooled_model import engine_of
from penstock_server.models.served_models import ServedModels
from penstock_server.protocol.engine_bodies import (
    ExpertsBody,
    NodeBody,
    StatsBody,
)

#: The link over which experts come from the disk.
EXPERTS_LINK = "disk, experts"


def vllm_labels(model_name: str) -> dict[str, str]:
    """The labels of vLLM's series. Penstock has one engine, number 0."""
    return {"model_name": model_name, "engine": "0"}


class EngineCollector(Collector):
    """The series of all models that are loaded. A model's totals begin anew when it is loaded anew."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for model in self._models.models:
            if model.is_ready:
                _add(found, _EngineSeries(model.name, engine_of(model).loaded.snapshot()).collect())
                if model.adapters:
                    _add(found, [_loaded_adapters(model.name, model.adapters)])
        if self._models.swaps:
            _add(found, self._swaps())
        return found.values()

    def _swaps(self) -> Iterable[Metric]:
        """What becomes of models that come and go."""
        loaded = GaugeMetricFamily("penstock:model_loaded", "1: loaded", labels=["model_name"])
        loads = CounterMetricFamily("penstock:model_loads", "Times a model was loaded", labels=["model_name"])
        users = GaugeMetricFamily("penstock:model_users", "Requests that have it", labels=["model_name"])
        for model in self._models.models:
            loaded.add_metric([model.name], model.is_ready)
            loads.add_metric([model.name], model.num_loads)
            users.add_metric([model.name], model.num_users)
        return loaded, loads, users


def _add(found: dict[str, Metric], more: Iterable[Metric]) -> None:
    """Adds samples to the series of the same names."""
    for metric in more:
        if metric.name in found:
            found[metric.name].samples += metric.samples
        else:
            found[metric.name] = metric


def _loaded_adapters(model_name: str, adapters: Collection[str]) -> Metric:
    """vLLM's series of adapters, by which routers find a server that has one. All adapters lie in memory, and
    all may run in one step, so that none waits. The value is a time: vLLM has a series for each state."""
    labels = vllm_labels(model_name) | {
        "max_lora": str(len(adapters)),
        "running_lora_adapters": ",".join(sorted(adapters)),
        "waiting_lora_adapters": "",
    }
    gauge = GaugeMetricFamily("vllm:lora_requests_info", "Adapters that are loaded", labels=[*labels])
    gauge.add_metric([*labels.values()], time.time())
    return gauge


class _EngineSeries:
    """The series of one engine."""

    def __init__(self, model_name: str, snapshot: EngineSnapshot) -> None:
        self._model_name = model_name
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        snapshot = self._snapshot
        now = snapshot.stats
        used = now.kv_blocks_used / now.kv_blocks_total if now.kv_blocks_total else 0.0
        for series, value in series_of(now):
            yield self._metric(series, value)
        yield self._gauge("vllm:kv_cache_usage_perc", "Used part of the KV cache, 0 to 1", used)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        yield self._gauge("penstock:peak_rss_bytes", "Most memory this process ever had resident", peak)
        if now.step_seconds and now.floor_seconds:
            share = now.floor_seconds / now.step_seconds
            yield self._gauge(
                "penstock:floor_share", "Least possible step time / measured, since start", share
            )
        if now.experts is not None:
            yield from self._experts(now, now.experts)
        yield self._hits_by_tier(now)
        yield self._preemptions(now)
        if now.nodes:
            yield from self._nodes(now.nodes)
        yield self._waiting_by_reason(now)
        yield self._accepted_by_place(now)
        yield self._tokens_per_step(snapshot)
        yield self._cache_config(snapshot)
        yield from self._links(now.links)

    def _nodes(self, nodes: Sequence[NodeBody]) -> Iterable[Metric]:
        """The other machines that compute layers."""
        labels = ["model_name", "rank"]
        ready = GaugeMetricFamily("penstock:node_ready", "1: the machine can compute", labels=labels)
        steps = CounterMetricFamily("penstock:node_steps", "Steps that a machine computed", labels=labels)
        busy = CounterMetricFamily("penstock:node_busy_seconds", "Seconds of these steps", labels=labels)
        losses = CounterMetricFamily("penstock:node_losses", "Times a machine was lost", labels=labels)
        for node in nodes:
            names = [self._model_name, str(node.rank)]
            ready.add_metric(names, node.state == "ready")
            steps.add_metric(names, node.num_steps)
            busy.add_metric(names, node.busy_s)
            losses.add_metric(names, node.num_losses)
        return ready, steps, busy, losses

    def _accepted_by_place(self, now: StatsBody) -> Metric:
        labels = _labels(self._model_name, "vllm:")
        counter = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Trees of guessed tokens that were right at a depth",
            labels=[*labels, "position"],
        )
        for place, count in enumerate(now.accepted_by_place):
            counter.add_metric([*labels.values(), str(place)], count)
        return counter

    def _experts(self, now: StatsBody, experts: ExpertsBody) -> Iterable[Metric]:
        """How often experts were in memory, what a token made the disk read, and which experts are hot."""
        read = now.links.get(EXPERTS_LINK)
        rate = now.expert_hits / now.expert_queries if now.expert_queries else 0.0
        yield self._gauge("penstock:expert_hit_rate", "Experts in memory / asked for, since start", rate)
        yield self._gauge(
            "penstock:expert_bytes_per_token",
            "Bytes of experts from the disk / tokens computed, since start",
            read.num_bytes / now.step_tokens if read and now.step_tokens else 0.0,
        )
        yield self._gauge("penstock:expert_slots", "Experts that have room", experts.num_slots)
        yield self._gauge("penstock:pinned_experts", "Experts that stay in memory", experts.num_pinned)
        labels = _labels(self._model_name, "penstock:")
        hot = GaugeMetricFamily(
            "penstock:hot_expert_share",
            "Share of the steps that asked for one of the most used experts",
            labels=[*labels, "layer", "expert"],
        )
        for each in experts.hot:
            hot.add_metric([*labels.values(), str(each.layer), str(each.expert)], each.share)
        yield hot

    def _hits_by_tier(self, now: StatsBody) -> Metric:
        """Prompt tokens that were not computed, by where their keys and values lay."""
        labels = _labels(self._model_name, "penstock:")
        counts = {"disk": now.kv_disk.reads.num_tokens if now.kv_disk else 0}
        if now.kv_host is not None:
            counts["host"] = now.kv_host.reads.num_tokens
        # A preempted sequence finds tokens again that are no hits of a prompt.
        counts = {"memory": max(0, now.prefix_cache_hits - sum(counts.values()))} | counts
        counter = CounterMetricFamily(
            "penstock:kv_hit_tokens",
            "Tokens whose keys and values were found, by tier",
            labels=[*labels, "tier"],
        )
        for tier, count in counts.items():
            counter.add_metric([*labels.values(), tier], count)
        return counter

    def _preemptions(self, now: StatsBody) -> Metric:
        """Preempted sequences by what was decided: their keys and values are moved, or computed again."""
        labels = _labels(self._model_name, "penstock:")
        counter = CounterMetricFamily(
            "penstock:preemptions", "Sequences preempted, by kind", labels=[*labels, "kind"]
        )
        kinds = {"moved": now.preemptions.num_moved, "recomputed": now.preemptions.num_recomputed}
        for kind, count in kinds.items():
            counter.add_metric([*labels.values(), kind], count)
        return counter

    def _waiting_by_reason(self, now: StatsBody) -> Metric:
        """Waiting sequences by vLLM's reasons. "deferred" sequences wait for a LoRA adapter or a transfer at
        vLLM; here all sequences wait for room ("capacity")."""
        labels = _labels(self._model_name, "vllm:")
        name = "vllm:num_requests_waiting_by_reason"
        gauge = GaugeMetricFamily(name, "Sequences waiting, by reason", labels=[*labels, "reason"])
        for reason, value in (("capacity", now.num_waiting), ("deferred", 0)):
            gauge.add_metric([*labels.values(), reason], value)
        return gauge

    def _tokens_per_step(self, snapshot: EngineSnapshot) -> Metric:
        bounds = [*(str(float(bound)) for bound in snapshot.step_token_bounds), "+Inf"]
        counts = map(float, accumulate(snapshot.stats.steps_by_tokens))
        labels = _labels(self._model_name, "vllm:")
        histogram = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens in a step", labels=[*labels])
        histogram.add_metric(
            [*labels.values()], list(zip(bounds, counts, strict=True)), snapshot.stats.step_tokens
        )
        return histogram

    def _cache_config(self, snapshot: EngineSnapshot) -> Metric:
        num_blocks = snapshot.stats.kv_blocks_total
        num_tokens = num_blocks * snapshot.block_size
        labels = _labels(self._model_name, "vllm:")
        info = InfoMetricFamily("vllm:cache_config", "Blocks of keys and values", labels=[*labels])
        facts = {
            "block_size": str(snapshot.block_size),
            "cache_dtype": snapshot.kv_dtype,
            "num_gpu_blocks": str(num_blocks),
            "kv_cache_size_tokens": str(num_tokens),
            # The number of sequences of the greatest length that fit at a time.
            "kv_cache_max_concurrency": f"{num_tokens / snapshot.max_model_len:.2f}",
        }
        info.add_metric([*labels.values()], facts)
        return info

    def _links(self, links: dict[str, Traffic]) -> Iterable[Metric]:
        """The traffic of each link. A link's rate is bytes / busy seconds."""
        labels = ["model_name", "link"]
        moved = CounterMetricFamily("penstock:link_bytes", "Bytes of weights over a link", labels=labels)
        busy = CounterMetricFamily("penstock:link_busy_seconds", "Seconds a link was in use", labels=labels)
        for name, traffic in links.items():
            moved.add_metric([self._model_name, name], traffic.num_bytes)
            busy.add_metric([self._model_name, name], traffic.busy_s)
        return moved, busy

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._metric(Series(name, text, False), value)

    def _metric(self, series: Series, value: float) -> Metric:
        labels = _labels(self._model_name, series.name)
        kind = CounterMetricFamily if series.is_total else GaugeMetricFamily
        metric = kind(series.name, series.help, labels=[*labels])
        metric.add_metric([*labels.values()], value)
        return metric


def _labels(model_name: str, series: str) -> dict[str, str]:
    """The labels that a series of this name has."""
    return vllm_labels(model_name) if series.startswith("vllm:") else {"model_name": model_name}
