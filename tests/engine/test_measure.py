"""What is measured of products: the work that was really done, by the kernels that the config asks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import measure
from penstock.config import EngineConfig
from penstock.kernel_tuning import KernelTuning
from penstock.kernels import Matrix, cpu_builds, fingerprint
from penstock.kernels.cpu_builds import compiled_builds
from penstock.kernels.cuda import nvrtc
from penstock.kernels.int4_tensor import Int4Tensor
from penstock.kernels.reference import ReferenceKernels
from penstock.memory import kept_rates
from penstock.memory.hardware import RECURRENCE, HardwareProfile, KernelProfile, LaneProfile
from penstock.memory.planning.cost import predict_step
from penstock.memory.planning.planner import plan_memory
from penstock.memory.planning.product_times import own_rates, product_s, recurrence_s
from penstock.memory.planning.step_work import StepLoad
from penstock.model.footprint import footprint
from penstock.model.registry import open_model
from penstock.weights.formats.priced_formats import price_name


class Clocked(ReferenceKernels):
    """Kernels with a clock of their own: 1 ms and 2 us per row of integers for each MB of weights."""

    def __init__(self, rows_per_token: int) -> None:
        super().__init__()
        self.now_s = 0.0
        self._rows_per_token = rows_per_token

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        rows, columns = weight.shape
        self.now_s += rows * columns / 1e6 * (1e-3 + 2e-6 * self._rows_per_token * len(x))
        return x


@pytest.mark.parametrize(
    ("config", "rows_per_token"), [(EngineConfig(), 2), (EngineConfig(activations="int8"), 1)]
)
def test_products_have_the_rates_of_the_kernels(
    config: EngineConfig, rows_per_token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocked = Clocked(rows_per_token)
    monkeypatch.setattr(measure, "choose_kernels", lambda *_: clocked)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clocked.now_s)
    monkeypatch.setattr(measure, "PRODUCT_SHAPE", (96, 64))
    rates = measure._product_rates(config, 1)
    assert [rows for rows, _ in rates] == [rows_per_token * tokens for tokens in measure.PRODUCT_TOKENS]
    for rows, gbps in rates:
        assert gbps == pytest.approx(1e-3 / (1e-3 + 2e-6 * rows))


class Slow(Clocked):
    """Matrices of codes take three times as long; a recurrence takes 1 ms and 1 us a token."""

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        before = self.now_s
        super().linear(x, weight, bias)
        self.now_s += 2 * (self.now_s - before) if isinstance(weight, Int4Tensor) else 0.0
        return x

    def recurrence(self, q: Tensor, *others: Any) -> Tensor:
        self.now_s += 1e-3 + 1e-6 * len(q)
        return q


def test_tokens_of_hybrids_take_what_their_recurrences_were_measured_to_take() -> None:
    rates = ((1, 0.5), (8, 0.25), (64, 0.0625))  # of 1e9 elements: 2, 4 and 16 seconds
    lane = LaneProfile(False, 0, 1.0, 1.0, formats=((RECURRENCE, rates),))
    assert recurrence_s(lane, int(4e9), 1, 1) == pytest.approx(2.0)
    assert recurrence_s(lane, int(4e9), 3, 3) == pytest.approx(6.0)
    assert recurrence_s(lane, int(4e9), 1, 128) == pytest.approx(32.0)
    assert recurrence_s(replace(lane, formats=()), int(4e9), 1, 1) == 0.0


def test_each_format_has_rates_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are kept, and a file that was kept before they were measured stays good."""
    slow = Slow(2)
    monkeypatch.setattr(measure, "choose_kernels", lambda *_: slow)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: slow.now_s)
    monkeypatch.setattr(measure, "PRODUCT_SHAPE", (96, 256))
    monkeypatch.setattr(measure, "FORMAT_SHAPE", (96, 256))
    monkeypatch.setattr(measure, "STATE_HEADS", (2, 1, 8))
    monkeypatch.setattr(measure, "memory_read_gbps", lambda num_threads, readers: 0.5)
    monkeypatch.setattr(measure, "_kernel_profile", lambda *_: KernelProfile("some", KernelTuning()))
    config, cache = EngineConfig(device="cpu", num_threads=1), tmp_path / "rates.json"
    found = measure.measure_hardware(None, config, cache)
    names = [price_name(kind) for kind in measure.PRICED]
    assert [name for name, _ in found.formats] == [*names, RECURRENCE]
    assert len(set(names)) == len(measure.PRICED)
    of_recurrence = dict(found.formats)[RECURRENCE]
    assert [tokens for tokens, _ in of_recurrence] == list(measure.STATE_TOKENS)
    for tokens, gbps in of_recurrence:
        assert gbps == pytest.approx(2 * 8 * 8 / 1e9 / (1e-3 + 1e-6 * tokens))
    for name, rates in found.formats[:-1]:
        assert [rows for rows, _ in rates] == [2 * tokens for tokens in measure.FORMAT_TOKENS]
        for rows, gbps in rates:
            seconds = (1e-3 + 2e-6 * rows) * (3 if name.startswith(("int4", "int3", "int2")) else 1)
            assert gbps == pytest.approx(1e-3 / seconds)
    before = kept_rates.read(cache)
    monkeypatch.setattr(measure, "_timed_products", lambda *_: pytest.fail("measured again"))
    kept_rates.write(
        cache, {key: each for key, each in before.items() if not key.startswith(("formats", "recurrence"))}
    )
    again = measure.measure_hardware(None, config, cache)
    assert [name for name, _ in again.formats] == [name for name, _ in found.formats]
    for part in ("_median_s", "_recurrence_rates"):
        monkeypatch.setattr(measure, part, lambda *_: pytest.fail("measured again"))
    assert measure.measure_hardware(None, config, cache).formats == again.formats


def test_matrices_in_several_formats_take_the_sum_of_their_times() -> None:
    products = ((2, 2.0), (16, 1.0), (64, 0.5))
    known = (("slow", ((2, 0.5), (64, 0.1))),)
    own = own_rates(products, known, (("int8", 3_000), ("slow", 1_000)))
    for rows, _ in products:
        apart = product_s(products, 3_000, 3_000, rows) + product_s(products, 0, 1_000, rows, known[0][1])
        assert product_s(products, 1, 4_000, rows, own) == pytest.approx(apart)
    assert own_rates(products, known, (("int8", 5),)) == own_rates(products, known, (("other", 5),)) == ()
    assert own_rates((), known, (("slow", 5),)) == ()


def test_a_plan_knows_the_formats_of_a_model(tiny_llama: Path) -> None:
    """A model in groups of 32 takes as long as groups of 32 were measured to take."""
    products = ((2, 10.0), (512, 0.1))
    hardware = HardwareProfile(2, 1 << 34, 1 << 34, 10.0, 1e6, products=products)
    opened = open_model(tiny_llama, group_size=32)
    size = footprint(opened.spec, opened.store.tensors)
    assert size.formats == (("int8, groups of 32", size.layer_elements),)
    plain = EngineConfig(device="cpu")
    found = []
    for formats in ((), (("int8, groups of 32", ((2, 2.0), (512, 0.02))),)):
        own = replace(hardware, formats=formats)
        plan = plan_memory(size, own, plain)
        found.append(predict_step(plan, size, own, plain, StepLoad(256, 0)).products_s)
    assert found[0] == pytest.approx(product_s(products, size.decoder_bytes, size.layer_elements, 512))
    assert found[1] == pytest.approx(size.layer_elements / 0.02e9)


def test_rates_are_those_of_the_kernels_that_the_config_asks_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each measured once, and none taken for another's; torch's threads are what they were."""
    asked: list[tuple[str, str, int, int]] = []

    threads: list[int] = []

    def choose(config: EngineConfig) -> ReferenceKernels:
        asked.append((config.kernels, config.activations, threads[-1], torch.get_num_threads()))
        return Clocked(config.rows_per_token)

    monkeypatch.setattr(measure, "use_processor", lambda config, num_threads: threads.append(num_threads))
    monkeypatch.setattr(measure, "choose_kernels", choose)
    monkeypatch.setattr(measure, "_timed_products", lambda kernels, rows: ((rows, 1.0 + len(asked)),))
    monkeypatch.setattr(measure, "memory_read_gbps", lambda num_threads, readers: 0.5)
    configs = [
        EngineConfig(device="cpu", kernels="torch", num_threads=1),
        EngineConfig(device="cpu", kernels="torch", num_threads=2),
        EngineConfig(device="cpu", kernels="torch", num_threads=1, activations="int8"),
        EngineConfig(device="cpu", kernels="reference", num_threads=1),
    ]
    before = torch.get_num_threads()
    first = [measure.measure_hardware(None, config, tmp_path / "rates.json") for config in configs]
    assert [(kernels, activations, threads) for kernels, activations, threads, _ in asked] == [
        (config.kernels, config.activations, config.num_threads) for config in configs
    ]
    assert torch.get_num_threads() == before
    assert [profile.products for profile in first] == [((2, 2.0),), ((2, 3.0),), ((1, 4.0),), ((2, 5.0),)]
    again = [measure.measure_hardware(None, config, tmp_path / "rates.json") for config in configs]
    assert [profile.products for profile in again] == [profile.products for profile in first]
    assert len(asked) == len(configs)


def test_other_kernels_have_another_fingerprint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = [fingerprint(EngineConfig()), fingerprint(EngineConfig(activations="int8"))]
    monkeypatch.setattr(cpu_builds, "_library_path", lambda build: tmp_path / build)
    for code in (b"one", b"two"):
        for build, _ in cpu_builds.BUILDS:
            (tmp_path / build).write_bytes(code)
        found.append(fingerprint(EngineConfig()))
    found += [fingerprint(EngineConfig(kernels="reference")), fingerprint(EngineConfig(kernels="torch"))]
    assert len(set(found)) == len(found)
    monkeypatch.setattr(cpu_builds, "_library_path", lambda build: None)
    assert fingerprint(EngineConfig()) == fingerprint(EngineConfig(kernels="torch"))
    assert not compiled_builds()


def test_kernels_of_a_gpu_have_fingerprints_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    monkeypatch.setattr(nvrtc, "_libraries", lambda: ())
    fallback = fingerprint(EngineConfig(), gpu)
    assert fallback == fingerprint(EngineConfig(kernels="torch"), gpu)
    forced = fingerprint(EngineConfig(kernels="native"), gpu)
    monkeypatch.setattr(nvrtc, "source", lambda: "other code")
    assert len({fallback, forced, fingerprint(EngineConfig(kernels="native"), gpu)}) == 3
