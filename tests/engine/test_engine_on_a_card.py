"""Whole engines on a pretended card, loaded as a user loads them: their answers are those of the CPU however
layers are placed, nothing is left of them, and what a card refuses is said."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_card import PretendedCard, engines, missing
from test_convert import store_of
from test_cpmant import build as build_cpm_ant
from test_encoder_decoder import build as build_encoder_decoder
from tiny_models import build

from penstock import measure
from penstock.config import EngineConfig
from penstock.engine import Completion
from penstock.errors import CapacityError, ConfigError
from penstock.kernel_tuning import KernelTuning
from penstock.kernels import tuning
from penstock.kernels.cpu import NativeKernels
from penstock.kv_disk.fingerprint import arithmetic
from penstock.loader import planning
from penstock.memory import rates
from penstock.memory.hardware import DeviceProfile, KernelProfile, capacities
from penstock.memory.lane import find_lane
from penstock.memory.machine_rates import Measure
from penstock.weights.conversion.convert import convert

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

GIB = 1 << 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As it was made, not converted for streaming."""
    folder = tmp_path_factory.mktemp("checkpoint")
    build("Llama", folder, num_hidden_layers=3)
    return folder


@pytest.fixture(scope="module")
def model(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    engines.convert_for_streaming(checkpoint, folder)
    return folder


def check_nothing_is_left(card: PretendedCard) -> None:
    assert not card.races.found and not card.strayed
    assert card.driver.num_registered == 0
    assert card.memory.used_bytes == 0


def assert_same_answers(found: list[Completion], expected: list[Completion]) -> None:
    """The same tokens, and logprobs that differ by the order in which norms and attention add up: where it
    rounds an activation to another of its 16-bit integers, by some 1e-4."""
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    for mine, theirs in zip(found, expected, strict=True):
        for at, of in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert at.logprob == pytest.approx(of.logprob, abs=2e-3)


# Answers.


@pytest.mark.inner
@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "CPM-2", "CPM-Ant"])
def test_answers_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    """On cards without and with tensor cores; from pinned memory alone, and from the disk too (all four for
    Llama). All of them are the same, to the last bit: products are exact, and nothing else depends on card or
    place. test_families.py computes the layers of every family with the CUDA kernels."""
    combinations = [((6, 1), "disk"), ((7, 5), "host")]
    if name == "Llama":
        combinations += [((6, 1), "host"), ((7, 5), "disk")]
    if name == "CPM-2":
        build_encoder_decoder(name, tmp_path / "made")
    elif name == "CPM-Ant":
        build_cpm_ant(name, tmp_path / "made", num_hidden_layers=4)
    else:
        build(name, tmp_path / "made", num_hidden_layers=4)
    engines.convert_for_streaming(tmp_path / "made", tmp_path / "model")
    expected = engines.answer(engines.load(tmp_path / "model", "cpu", kernels="reference"))
    little = engines.little_host_memory(tmp_path / "model", num_layers=3)
    found = []
    for capability, lowest in combinations:
        with engines.card_with_kernels(capability) as card:
            engine = engines.load(
                tmp_path / "model",
                num_resident_layers=0,
                host_memory_bytes=little if lowest == "disk" else None,
            )
            assert engines.homes(engine) == {"host", lowest}
            found.append(engines.answer(engine))
            del engine
            check_nothing_is_left(card)
            has_combined = "combine_2" in card.driver.num_launches
            assert has_combined == (capability == (7, 5)), "tensor cores are for 7.5"
    assert_same_answers(found[0], expected)
    assert found == [found[0]] * len(combinations)


@pytest.mark.parametrize(("name", "sizes"), [("OPT", {"word_embed_proj_dim": 32}), ("Gemma 3n", {})])
def test_what_is_embedded_changes_no_thread_and_no_parameter(
    name: str, sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of embed() are the processor's, as the config has it from the start: other models of the
    process compute meanwhile."""
    build(name, tmp_path, **sizes)
    told = list[object]()
    set_num_threads, apply = NativeKernels.set_num_threads, tuning.apply
    monkeypatch.setattr(
        NativeKernels, "set_num_threads", lambda kernels, n: (told.append(n), set_num_threads(kernels, n))[1]
    )
    monkeypatch.setattr(tuning, "apply", lambda values: (told.append(values), apply(values))[1])
    own = KernelTuning(prefetch_bytes=1024)
    expected = engines.answer(engines.load(tmp_path, "cpu", kernel_tuning=own))
    with engines.card_with_kernels() as card:
        told.clear()
        engine = engines.load(tmp_path, kernel_tuning=own)
        assert set(told) <= {1, own}
        told.clear()
        found = engines.answer(engine)
        assert not told
        assert_same_answers(found, expected)
        del engine
        check_nothing_is_left(card)


def test_int8_keys_and_values(model: Path, card: PretendedCard) -> None:
    expected = engines.answer(engines.load(model, "cpu", kernels="reference", kv_dtype="int8"))
    engine = engines.load(model, num_resident_layers=1, kv_dtype="int8")
    found = engines.answer(engine)
    del engine
    check_nothing_is_left(card)
    assert card.driver.num_launches["write_kv_int8"]
    assert_same_answers(found, expected)


@pytest.mark.parametrize("quantized", [{"weights": "int4", "group_size": 32}, {"group_size": 32}])
def test_weights_in_groups(quantized: dict[str, Any], checkpoint: Path, card: PretendedCard) -> None:
    """4-bit codes, and INT8 with a scale per group."""
    engine = engines.load(checkpoint, num_resident_layers=1, **quantized)
    found = engines.answer(engine)
    assert_same_answers(found, engines.answer(engines.load(checkpoint, "cpu", **quantized)))
    name = "codes" if "weights" in quantized else "groups"
    assert {f"{name}_quantize_2", f"{name}_tiled_2"} <= set(card.driver.num_launches)
    del engine
    check_nothing_is_left(card)


@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("capability", [(6, 1), (7, 5)])
def test_planes_have_the_bits_of_int8(
    group_size: int | None, capability: tuple[int, int], checkpoint: Path, tmp_path: Path
) -> None:
    """Whichever planes stay on the card, and converted or not."""
    store = store_of(checkpoint, group_size, "planes")
    convert(store, tmp_path)
    with engines.card_with_kernels(capability) as card:
        expected = engines.answer(engines.load(checkpoint, group_size=group_size))
        card.driver.num_launches.clear()
        found = []
        for num_resident in (1, 2, 3):  # of twice as many planes, upper ones first
            engine = engines.load(tmp_path, num_resident_layers=num_resident)
            assert len(engine.plan.layers) == 6 and ("host" in engines.homes(engine)) == (num_resident < 3)
            found.append(engines.answer(engine))
            del engine
            check_nothing_is_left(card)
        launched = set(card.driver.num_launches)
    assert found == [expected] * 3
    form = "planes" if group_size is None else "plane_groups"
    assert f"{form}_gemv_1_2" in launched
    assert any(name.startswith(f"{form}_tiled") for name in launched)
    assert ("join_planes" in launched) == (group_size is None and capability == (7, 5)), "for tensor cores"


@pytest.mark.parametrize("num_resident", [1, 9])
def test_layers_that_stay_on_the_card(num_resident: int, model: Path, card: PretendedCard) -> None:
    engine = engines.load(model, num_resident_layers=num_resident)
    assert engines.homes(engine) == ({"device"} if num_resident > 3 else {"device", "host"})
    assert_same_answers(engines.answer(engine), engines.answer(engines.load(model, "cpu")))
    del engine
    check_nothing_is_left(card)


def test_kernels_of_torch(model: Path, card: PretendedCard) -> None:
    """They serve where there is no NVRTC."""
    engine = engines.load(model, num_resident_layers=1, kernels="torch", max_num_batched_tokens=8)
    expected = engines.answer(engines.load(model, "cpu", kernels="reference"), num_prompts=1)
    assert_same_answers(engines.answer(engine, num_prompts=1), expected)
    assert not card.driver.num_launches and not card.races.found


def test_a_step_waits_for_the_card_once(model: Path, card: PretendedCard) -> None:
    """For its logits; everything else is queued."""
    engine = engines.load(model, num_resident_layers=1)
    card.host_waits.clear()
    engines.answer(engine)
    assert card.host_waits == ["a copy"] * engine.metrics.num_steps


# One of several cards.


@pytest.mark.parametrize("number", [0, 1])
def test_one_of_two_cards(number: int, model: Path) -> None:
    """This card alone is used: of the other one only the name may be asked."""
    expected = engines.answer(engines.load(model, "cpu", kernels="reference"))
    little = engines.little_host_memory(model, num_layers=2)
    with engines.card_with_kernels(number=number, num_cards=2) as card:
        engine = engines.load(model, f"cuda:{number}", num_resident_layers=1, host_memory_bytes=little)
        assert engines.homes(engine) == {"device", "disk"}
        assert engine.config.device == f"cuda:{number}" and engine.plan.has_gpu
        assert arithmetic(engine.config, "penstock")["card"].startswith("Pretended GTX 1060,")
        assert_same_answers(engines.answer(engine), expected)
        assert card.driver.num_launches
        del engine
        check_nothing_is_left(card)


def test_a_plan_is_about_the_card_that_was_asked_for() -> None:
    with engines.card_with_kernels(number=1, num_cards=2) as card:
        card.memory.taken_bytes = GIB
        with contextlib.closing(find_lane("cuda:1")) as lane:
            found = lane.describe(capacities()).device
        assert found is not None and found.name == "Pretended GTX 1060"
        assert 0 <= found.total_bytes - GIB - found.free_bytes < 1 << 20  # torch keeps what it tried
        check_nothing_is_left(card)


def test_rates_are_measured_on_the_card_and_kept_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another card of the same name may lie in a slower slot."""
    asked: list[tuple[Measure, DeviceProfile]] = []

    def profile(folder: Path | None, measure: Measure, cache: Any, forced: bool, device: Any, *_: Any) -> Any:
        asked.append((measure, device))
        return capacities()

    monkeypatch.setattr(measure, "hardware_profile", profile)
    monkeypatch.setattr(measure, "_kernel_profile", lambda *_: KernelProfile(None))
    monkeypatch.setattr(measure, "device_gbps", lambda device: (1.0, device))
    monkeypatch.setattr(measure, "_device_gops", lambda config, device, _: device)
    crossings = list[torch.device]()
    monkeypatch.setattr(measure, "crossing_s", lambda lane, **_: crossings.append(lane.torch_device))
    for number in (0, 1):
        with engines.card_with_kernels(number=number, num_cards=2) as card:
            measure.measure_hardware(None, EngineConfig(device=f"cuda:{number}"))
            found, device = asked[-1]
            assert found.crossing_s is not None
            found.crossing_s()
            assert found.device() == {
                "memory_gbps": 1.0, "host_to_device_gbps": card.device, "int8_gops": card.device
            }  # fmt: skip
            assert device.name == "Pretended GTX 1060" and not card.strayed
            assert crossings[-1] == torch.device("cuda", number)
    assert asked[0][0].device_kernels != asked[1][0].device_kernels


def test_a_crossing_is_measured_with_a_handover(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows really go to the processor and back, one after the other."""
    with engines.card_with_kernels() as card, contextlib.closing(find_lane("cuda")) as lane:
        handover, rows = lane.handover(), list[int]()
        begin = handover.begin

        def counted(x: torch.Tensor, out_features: int, compute: Any, *_: object) -> torch.Tensor:
            return begin(x, out_features, lambda each: rows.append(len(each)) or compute(each))

        monkeypatch.setattr(handover, "begin", counted)
        assert rates.crossing_s(lane, rounds=1) > 0
        assert rows == [1] * 2 * rates.NUM_CROSSINGS and not card.races.found
        assert measure.card_launch_s(lane, EngineConfig(device="cuda:0"), None) > 0
        assert card.driver.num_launches["gemv_1_2"] > rates.NUM_LAUNCHES


def test_a_card_that_is_not_there(model: Path) -> None:
    with engines.card_with_kernels(number=1, num_cards=2) as card:
        named = r"--device cuda:2: there is no such GPU.*2: cuda:0 \(.*1080\), cuda:1 \(.*1060\)"
        with pytest.raises(ConfigError, match=named):
            engines.load(model, "cuda:2")
        check_nothing_is_left(card)


@pytest.mark.parametrize("device", ["cuda:", "cuda:-1", "cuda:x", "cuda:1 ", "gpu", "CUDA", "", "cuda:٣"])
def test_a_device_that_is_none(device: str) -> None:
    with pytest.raises(ConfigError, match="choose auto, cpu, cuda, or a GPU by its number"):
        EngineConfig(device=device)


# What is left, and what comes next.


def test_a_closed_engine_leaves_its_memory_to_the_next(model: Path, card: PretendedCard) -> None:
    """Even while somebody still holds it, as `with Engine.load() as engine` does when it comes a second time:
    there is room for one. And once nobody does, nothing waits for the garbage collector."""
    gc.collect()
    gc.disable()
    card.memory.taken_bytes = card.memory.total_bytes - (600 << 20)
    try:
        plans = []
        for _ in range(2):
            with engines.load(
                model, num_resident_layers=9, num_kv_tokens=None, kv_cache_bytes=100 << 20
            ) as engine:
                plans.append(engine.plan)
                assert card.memory.used_bytes > 100 << 20
            assert card.memory.used_bytes < 1 << 20
        first, second = plans
        assert first is not None and second is not None
        assert second.device_used_bytes == first.device_used_bytes
        del engine
        check_nothing_is_left(card)
    finally:
        gc.enable()


def test_an_engine_with_a_small_budget_limits_no_other(model: Path, card: PretendedCard) -> None:
    engines.load(model, device_memory_bytes=500 << 20).close()
    assert torch.zeros(GIB, dtype=torch.uint8, device="cuda").nbytes == GIB


def test_what_torch_keeps_in_reserve_does_not_hide_what_a_step_takes(
    model: Path, card: PretendedCard
) -> None:
    def workspace_bytes() -> int:
        with engines.load(model) as engine:
            return engine.plan.workspace_bytes

    expected = workspace_bytes()
    torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")  # such as a measurement leaves behind
    assert workspace_bytes() == expected


# What is not as it should be.


def test_layers_in_pinned_memory_are_read_once_whatever_their_files_are(
    checkpoint: Path, card: PretendedCard, caplog: pytest.LogCaptureFixture
) -> None:
    """Only what comes from the disk in each step has to be laid out for that."""
    with caplog.at_level(logging.WARNING):
        engines.load(checkpoint, num_resident_layers=1, strict_plan=True).close()
    assert not caplog.text
    little = engines.little_host_memory(checkpoint, num_layers=2)
    with pytest.raises(CapacityError, match=r"strict-plan.* of 3 layers .*penstock convert"):
        engines.load(checkpoint, num_resident_layers=1, host_memory_bytes=little, strict_plan=True)


def test_memory_that_can_not_be_pinned(
    model: Path, card: PretendedCard, caplog: pytest.LogCaptureFixture
) -> None:
    """Copies out of it are staged: slower, and as right. It is said, or refused."""
    card.driver.refuses_to_pin = True
    with caplog.at_level(logging.WARNING):
        engine = engines.load(model, num_resident_layers=1)
    assert "refused to pin" in caplog.text and "ulimit -l" in caplog.text
    assert engine.metrics.unpinned_bytes > 0 == engine.metrics.pinned_bytes
    assert_same_answers(engines.answer(engine), engines.answer(engines.load(model, "cpu")))
    with pytest.raises(CapacityError, match="strict-plan.*refused to pin"):
        engines.load(model, num_resident_layers=1, strict_plan=True)
    card.driver.refuses_to_pin = False
    engines.load(model, num_resident_layers=1, strict_plan=True).close()


def test_a_machine_whose_driver_is_missing(model: Path, card: PretendedCard) -> None:
    card.is_there = False
    with pytest.raises(ConfigError, match=r"--device cuda: .*finds no GPU.*driver"):
        engines.load(model)
    with engines.load(model, "auto") as engine:
        assert engine.config.device == "cpu"


def test_kernels_that_the_driver_refuses(model: Path) -> None:
    refused = pytest.raises(ConfigError, match=r"no such image.*driver.*--kernels torch")
    with engines.card_with_kernels(image=b"garbage"), refused:
        engines.load(model)


# Too little memory.


def test_a_budget_that_is_too_small(model: Path, card: PretendedCard) -> None:
    with pytest.raises(CapacityError, match=r"at least .* \(\d+ bytes\) of device memory.*--device-memory"):
        engines.load(model, device_memory_bytes=100 << 20)
    check_nothing_is_left(card)


def test_a_card_too_full_to_try_a_step(
    model: Path, card: PretendedCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_measured", {})  # an earlier test's step is not tried again
    card.memory.taken_bytes = card.memory.total_bytes - 1000
    with pytest.raises(CapacityError, match=r"largest step, of 40 tokens.*nvidia-smi.*--max-num-batched"):
        engines.load(model)
    card.memory.taken_bytes = 0
    engines.load(model).close()


@pytest.mark.parametrize("missing_part", ["weights", "tables of its positions", "keys and values", "head"])
def test_somebody_else_takes_the_memory_after_the_plan_was_made(
    missing_part: str, model: Path, card: PretendedCard
) -> None:
    config = {"num_resident_layers": 9, "num_kv_tokens": 8192}
    with engines.load(model, **config) as engine:
        plan = engine.plan
        tables_bytes = card.memory.used_bytes - plan.layer_bytes("device") - plan.head_bytes - plan.kv_bytes
    del engine
    weights = plan.layer_bytes("device")
    left = {
        "weights": weights - 1,
        "tables of its positions": weights + 1,
        "keys and values": weights + tables_bytes + plan.kv_bytes - 1,
        "head": weights + tables_bytes + plan.kv_bytes + 4096,
    }[missing_part]
    free = DeviceProfile("a card", (6, 1), 6 * GIB, 6 * GIB, 0.0, 0.0, 0.0, GIB)
    hardware = dataclasses.replace(capacities(), device=free)
    card.memory.taken_bytes = card.memory.total_bytes - left
    said = (
        r"no \d+ bytes left: \d+ of \d+"
        if "tables" not in missing_part
        else f"no room for the {missing_part}"
    )
    with pytest.raises(CapacityError, match=f"{said}.* are free.*nvidia-smi"):
        engines.load(model, hardware=hardware, max_num_batched_tokens=1, **config)
    gc.collect()  # the error knows the frames that it came through
    check_nothing_is_left(card)
