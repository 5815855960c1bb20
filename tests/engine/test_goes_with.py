"""What goes with what: the table is what a config, a plan and a model's loader refuse."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from penstock.config import EngineConfig, KVEventsConfig
from penstock.errors import ConfigError
from penstock.goes_with import FACTS, REFUSALS, Feature, check_together
from penstock.kernel_tuning import KernelTuning
from penstock.memory.hardware import HardwareProfile
from penstock.memory.planning.planner import plan_memory
from penstock.spec import ModelFootprint

ENGINE = Path(__file__).parents[2] / "engine" / "penstock"
#: What a user writes for a feature.
ASKED: dict[Feature, dict[str, Any]] = {
    Feature.NO_SPECULATION: {"speculation": "off"},
    Feature.DRAFT_MODEL: {"draft_model": "small"},
    Feature.EAGLE3: {"draft_model": "head", "draft_with_eagle3": True},
    Feature.MTP: {"mtp": "on"},
    Feature.PLANES: {"draft_with_planes": True},
    Feature.NO_PREFIX_CACHING: {"enable_prefix_caching": False},
    Feature.KV_DISK: {"kv_disk": "folder"},
    Feature.KV_HOST: {"kv_host_bytes": 1 << 30},
    Feature.KV_SPILL: {"kv_spill": "folder"},
    Feature.KV_SPILL_MEMORY: {"kv_spill_bytes": 1 << 30},
    Feature.KV_EVENTS: {"kv_events": KVEventsConfig()},
    Feature.KV_INT8: {"kv_dtype": "int8"},
    Feature.LORA: {"adapters": (("poet", "folder"),)},
    Feature.GENERATE: {"runner": "generate"},
    Feature.POOLING: {"pooling": "mean"},
    Feature.THROUGH_TRANSFORMERS: {"model_impl": "transformers"},
    Feature.TORCH_KERNELS: {"kernels": "torch"},
    Feature.TUNING: {"kernel_tuning": KernelTuning()},
    Feature.DEVICE_MEMORY: {"device_memory_bytes": 1 << 30},
}


@pytest.mark.parametrize("feature", ASKED, ids=lambda feature: feature.name)
def test_a_config_tells_what_it_asks_for(feature: Feature) -> None:
    assert EngineConfig(**ASKED[feature]).features == {feature}
    assert EngineConfig().features == frozenset()


def test_a_config_is_refused_as_the_table_says() -> None:
    num_refused = 0
    for pair in combinations(ASKED, 2):
        first, second = pair
        if {first, second} == {Feature.DRAFT_MODEL, Feature.EAGLE3}:
            continue  # a draft model is the one or the other
        values = ASKED[first] | ASKED[second]
        if pair not in REFUSALS:
            left_out = {Feature.DRAFT_MODEL} if set(pair) == {Feature.DRAFT_MODEL, Feature.PLANES} else set()
            assert EngineConfig(**values).features == {first, second} - left_out
            continue
        num_refused += 1
        with pytest.raises(ConfigError) as caught:
            EngineConfig(**values)
        told = str(caught.value)
        assert first.value in told and second.value in told and REFUSALS[pair].advice in told
    assert num_refused > 10


def test_a_plan_refuses_what_a_machine_or_a_model_is_not_for() -> None:
    alone = HardwareProfile(4, 64 << 30, 64 << 30, 20.0, 500.0)
    model = ModelFootprint((1 << 20,) * 2, 1 << 20, 1 << 20, 256, 1 << 20, 1 << 20, 2048, 64, 128, 256)
    num_refused = 0
    for feature, values in ASKED.items():
        config = EngineConfig(**values)
        for kinds in ({Feature.RECURRENT}, {Feature.ENCODER}, {Feature.BOTH_WAYS}, {Feature.FOREIGN}):
            size = replace(model, features=frozenset(kinds))
            expected = [kind for kind in {*kinds, Feature.NO_GPU} if (feature, kind) in REFUSALS]
            if not expected:
                continue
            num_refused += 1
            with pytest.raises(ConfigError) as caught:
                plan_memory(size, alone, config)
            assert all(kind.value in str(caught.value) for kind in expected)
    assert num_refused > 10


def test_every_feature_is_told_by_someone_and_two_facts_are_never_refused() -> None:
    sources = [path.read_text() for path in ENGINE.rglob("*.py") if path.name != "goes_with.py"]
    sources += [path.read_text() for path in (ENGINE.parents[1] / "server").rglob("*.py")]
    for feature in Feature:
        assert any(f"Feature.{feature.name}" in text for text in sources), feature
        assert any(feature in pair for pair in REFUSALS), f"{feature} goes with everything"
    assert not [pair for pair in REFUSALS if set(pair) <= set(FACTS)]


def test_all_that_is_refused_is_told_and_the_model_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        check_together({Feature.NODES, Feature.KV_DISK, Feature.RECURRENT, Feature.EXPERTS}, "Qwen3Next")
    assert str(caught.value) == (
        "--kv-disk can't be used with --nodes yet: each machine would keep a part; leave it out. "
        "--nodes can't be used with a model with recurrent states (Qwen3Next) yet: states stay where they "
        "are computed; leave --nodes out"
    )
