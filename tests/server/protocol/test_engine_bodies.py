"""What operators' programs read: the names stay as they were, whatever the engine calls the same thing."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock_server
from fakes import FakeAsyncEngine, FakeModel
from penstock.config import EngineConfig
from penstock.generation.drafting.expectation import assumed_model
from penstock.kernel_tuning import KernelTuning
from penstock.memory.hardware import DiskProfile, HardwareProfile, KernelProfile
from penstock.memory.planning.cards import find_card
from penstock.memory.planning.cost import predict_step
from penstock.memory.planning.planner import plan_memory
from penstock.memory.planning.step_work import StepLoad
from penstock.metrics import StepStats, Traffic
from penstock.model.known_shapes import find_shape
from penstock.nodes.member import NodeStatus
from penstock_server.commands.planning.footprints import footprint_of
from penstock_server.commands.planning.plan_report import as_data, predictions
from penstock_server.facade.plan_table import served_plan_lines
from penstock_server.protocol.engine_bodies import ServedPlanBody, StatsBody

from ..conftest import MakeClient

PLAN = [
    "layers[].home",
    "layers[].is_resident",
    "layers[].num_bytes",
    "layers[].is_lower",
    "embedding_bytes",
    "head_bytes",
    "num_staging_slots",
    "num_host_slots",
    "staging_slot_bytes",
    "num_expert_slots",
    "num_host_expert_slots",
    "expert_slot_bytes",
    "block_size",
    "num_kv_blocks",
    "kv_bytes",
    "workspace_bytes",
    "is_workspace_measured",
    "has_gpu",
    "host_budget_bytes",
    "device_budget_bytes",
    "notes",
    "warnings",
    "host_used_bytes",
    "device_used_bytes",
    "streamed_bytes",
    "num_resident_layers",
    "num_encoder_layers",
    "num_cross_layers",
    "num_kv_tokens",
    "state_bytes",
    "num_state_slots",
    "num_state_sequences",
    "adapter_bytes",
    "kept_share",
    "shares_experts",
    "num_spilled_tokens",
    "kv_spill_bytes",
    "attended_share",
    "kv_host_bytes",
]
STEP = [
    "num_tokens",
    "num_sampled",
    "num_encoded",
    "terms.memory",
    "terms.arithmetic",
    "terms.disk",
    "terms.host_to_device",
    "terms.host_memory",
    "seconds",
    "products_s",
    "binding",
    "experts.num_asked",
    "experts.num_missing",
    "experts.num_from_disk",
    "experts.num_in_ram",
    "experts.hit_rate",
    "processor_share",
]
STATS = [
    "num_steps",
    "step_seconds",
    "stall_seconds",
    "floor_seconds",
    "predicted_seconds",
    "streamed_bytes",
    "prompt_tokens",
    "generated_tokens",
    "fast_forwarded_tokens",
    "draft_tokens",
    "accepted_tokens",
    "draft_chains",
    "accepted_by_place",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "expert_queries",
    "expert_hits",
    "num_preemptions",
    "num_running",
    "num_waiting",
    "kv_blocks_used",
    "kv_blocks_total",
    "num_resident_layers",
    "num_streamed_layers",
    "pinned_bytes",
    "unpinned_bytes",
    "last_step.duration_s",
    "last_step.num_tokens",
    "last_step.num_seqs",
    "last_step.num_sampled",
    "last_step.streamed_bytes",
    "last_step.stall_s",
    "last_step.floor_s",
    "last_step.predicted_s",
    "last_step.num_fast_forwarded",
    "last_step.num_drafts",
    "last_step.num_right_drafts",
    "last_step.num_experts",
    "last_step.num_expert_hits",
    "last_step.spilled_bytes",
    "links.disk.num_bytes",
    "links.disk.busy_s",
    "preemptions.num_moved",
    "preemptions.num_recomputed",
    "preemptions.moved_tokens",
    "preemptions.saved_s",
    "preemptions.write_s",
    "kv_disk",
    "kv_host",
    "kv_spill",
    "kv_events",
    "step_tokens",
    "steps_by_tokens",
    "time_s",
    "current_layer",
    "experts",
    "nodes",
]
HARDWARE = [
    "num_cores",
    "ram_bytes",
    "free_ram_bytes",
    "memory_read_gbps",
    "int8_gops",
    "disk.read_gbps",
    "disk.block_bytes",
    "disk.depth",
    "disk.is_direct",
    "spill_disk",
    "device.name",
    "device.compute_capability",
    "device.total_bytes",
    "device.free_bytes",
    "device.memory_gbps",
    "device.host_to_device_gbps",
    "device.int8_gops",
    "device.pinnable_bytes",
    "device.crossing_s",
    "device.launch_s",
    "products",
    "kept_since_s",
    "kernels.build",
    "kernels.tuning.prefetch_bytes",
    "kernels.tuning.prefetch_bytes_int4",
    "kernels.tuning.few_rows",
    "kernels.tuning.panel_inputs",
    "kernels.tuning.lane_rows",
    "kernels.tuning.read_threads",
    "kernels.others_share",
    "others_share",
]

CONFIG = EngineConfig(host_memory_bytes=6 << 30, share_products="off")
SIZE = footprint_of(find_shape("solar-10.7b"), CONFIG)
DISK = DiskProfile(2.0, 4 << 20, 4, True)
MACHINE = HardwareProfile(
    2, 24 << 30, 20 << 30, 40.0, 1500.0, DISK, find_card("GTX 1060"), ((1, 20.0), (8, 30.0)),
    kernels=KernelProfile("avx512", KernelTuning(), 0.0),
)  # fmt: skip
MEMORY_PLAN = plan_memory(SIZE, MACHINE, CONFIG)


def keys(value: Any, path: str = "") -> Iterator[str]:
    """Dotted, in their order, spaces as underscores; of a list of objects the first one's."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from keys(inner, f"{path}.{key}".lstrip(".").replace(" ", "_"))
    elif isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        yield from keys(value[0], f"{path}[]")
    else:
        yield path


@pytest.fixture
def model() -> FakeModel:
    """Of a server that has a plan and took a step."""
    model = FakeModel()
    model.plan = MEMORY_PLAN
    model.meter.predict = functools.partial(predict_step, MEMORY_PLAN, SIZE, MACHINE, CONFIG)
    model.metrics.record(StepStats(0.5, 3, 2, 1, 7, 0.25, 0.125, 0.375, 1, 9, 5))
    model.metrics.links = {"disk": Traffic(5, 0.5)}
    model.streamer.current_layer = 3
    return model


def test_the_plan_and_its_step(make_client: MakeClient, model: FakeModel) -> None:
    told = make_client(FakeAsyncEngine(model=model)).get("/v1/plan").json()
    beyond = ["model_impl", "is_batch_invariant", "draft_model_bytes", "draft_model_device_bytes"]
    assert [*keys(told)] == [*PLAN, *(f"step.{name}" for name in STEP), *beyond, "drafting", "nodes"]
    assert len(told["layers"]) == len(MEMORY_PLAN.layers) and told["kv_bytes"] == MEMORY_PLAN.kv_bytes
    assert told["num_resident_layers"] == len(MEMORY_PLAN.resident)
    step = model.meter.predict(StepLoad.decode(1))
    assert (told["step"]["seconds"], told["step"]["binding"]) == (step.seconds, step.binding)
    assert told["step"]["terms"] == step.terms
    assert (told["draft_model_bytes"], told["drafting"]) == (0, [])  # the time of no step is known


def test_several_machines(make_client: MakeClient, model: FakeModel) -> None:
    """In the plan, in the totals, and in Prometheus' series."""
    node = NodeStatus(1, "10.0.0.2:5", "away", "", (3, 6), 2, 100, 200, 3, False, 7, 0.5, 1, 12.2, 0.025)
    model.nodes = (node,)
    client = make_client(FakeAsyncEngine(model=model))
    expected = {**asdict(node), "layers": [3, 6]}
    assert client.get("/v1/plan").json()["nodes"] == [expected]
    assert client.get("/v1/engine/stats").json()["nodes"] == [expected]
    lines = client.get("/metrics").text.splitlines()
    series = [
        line.partition("{")[0] + " " + line.split()[-1] for line in lines if line.startswith("penstock:node")
    ]
    assert series == [
        "penstock:node_ready 0.0", "penstock:node_steps_total 7.0", "penstock:node_busy_seconds_total 0.5",
        "penstock:node_losses_total 1.0",
    ]  # fmt: skip
    (line,) = served_plan_lines(ServedPlanBody(**client.get("/v1/plan").json()))[-1:]
    assert line.startswith("rank 1 at 10.0.0.2:5 is away for 12 s: layers 3 to 5, 2 of 3 stay")
    assert "; 25.0 ms of a step of one token" in line


def test_the_plan_says_what_guesses_should_bring(make_client: MakeClient, model: FakeModel) -> None:
    model.meter.known_s = lambda num_tokens: 1 + 0.01 * num_tokens
    model.draft_model = SimpleNamespace(
        num_bytes=MEMORY_PLAN.host_used_bytes,
        num_card_bytes=7,
        assumed=assumed_model(10**9, lambda num_places: 0.01 * num_places),
    )
    told = make_client(FakeAsyncEngine(model=model)).get("/v1/plan").json()
    assert told["draft_model_bytes"] == MEMORY_PLAN.host_used_bytes
    assert told["draft_model_device_bytes"] == 7
    assert [*told["drafting"][0]] == [
        "source", "num_seqs", "num_guesses", "num_levels", "num_gained", "seconds", "drafting_s", "plain_s",
        "tokens_per_s", "plain_tokens_per_s",
    ]  # fmt: skip
    alone = {each["source"]: each for each in told["drafting"] if each["num_seqs"] == 1}
    assert [*alone] == ["new_text", "quotation", "draft_model"]
    for each in alone.values():
        assert each["plain_s"] == 1.01
        assert each["seconds"] == pytest.approx(1.01 + 0.01 * each["num_guesses"] + each["drafting_s"])
        assert each["tokens_per_s"] == pytest.approx(each["num_gained"] / each["seconds"])
    assert alone["draft_model"]["drafting_s"] > 0 == alone["quotation"]["drafting_s"]


def test_the_totals_and_the_last_step(make_client: MakeClient, model: FakeModel) -> None:
    told = make_client(FakeAsyncEngine(model=model)).get("/v1/engine/stats").json()
    assert [*keys(told)] == STATS
    assert (told["current_layer"], told["num_steps"], told["step_tokens"]) == (3, 1, 3)
    assert [*told["last_step"].values()] == [0.5, 3, 2, 1, 7, 0.25, 0.125, 0.375, 1, 9, 5, 0, 0, 0]
    assert told["links"] == {"disk": {"num_bytes": 5, "busy_s": 0.5}}


def test_the_page_reads_figures_that_there_are() -> None:
    """A figure has one name: the page's `stats.num_steps` is the field num_steps."""
    page = " ".join(path.read_text() for path in (Path(penstock_server.__file__).parent / "ui").glob("*.js"))
    for name, told in (
        ("stats", {each.name for each in fields(StatsBody)}),
        ("plan", {*ServedPlanBody.model_fields}),
    ):
        read = set(re.findall(rf"\b{name}\.([a-z]\w*)", page))
        assert len(read) > 10 and read <= told, read - told


def test_an_engine_that_did_nothing_yet(make_client: MakeClient) -> None:
    client = make_client(FakeAsyncEngine())
    told = client.get("/v1/engine/stats").json()
    assert (told["current_layer"], told["last_step"], told["links"]) == (None, None, {})


def test_what_the_plan_command_prints() -> None:
    told = as_data(MEMORY_PLAN, predictions(MEMORY_PLAN, SIZE, MACHINE, CONFIG), MACHINE)
    assert [*told] == ["plan", "steps", "hardware"]
    assert [*keys(told["plan"])] == PLAN and [*keys(told["hardware"])] == HARDWARE
    names = [f"decode, {n} sequence{'s' if n > 1 else ''}" for n in (1, 2)]  # more don't fit
    assert [*told["steps"]] == [*names, "prompt of 512"]
    assert all([*keys(step)] == STEP for step in told["steps"].values())
