"""Parameters of the native kernels: no bit of a result depends on them; how they are measured, kept, used."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from emulated_amx import COMPILER as AMX_COMPILER
from emulated_amx import emulated_amx_kernels
from test_int4_kernels import cases as int4_cases
from torch import Tensor

from penstock import kernels, measure
from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.errors import ConfigError
from penstock.kernel_tuning import TUNING_RANGES, KernelTuning
from penstock.kernels import Int4Tensor, Matrix, QuantizedTensor, choose_kernels, native_build
from penstock.kernels.cpu import NativeKernels
from penstock.kernels.cpu_builds import compiled_builds, load_library
from penstock.kernels.reference import ReferenceKernels
from penstock.kernels.tuning import Trial, apply, set_parameters, trials, tune
from penstock.memory import kept_rates
from penstock.memory.hardware import HardwareProfile, KernelProfile, ProductRates
from penstock.memory.kept_tuning import tuning_of, tunings_of_build
from penstock.memory.other_work import Moment, busy_seconds, others_share

BUILDS = [*compiled_builds(), *(["emulated amx"] if AMX_COMPILER and "amx" not in compiled_builds() else [])]
#: All values that are tried on any machine, and the ends of the ranges.
TUNINGS = [
    *(
        KernelTuning(**{trial.parameter: value})
        for trial in trials("avx512", 4)
        for value in trial.values
        if value != trial.values[0]
    ),
    KernelTuning(65536, 65536, 2, 256, 1024, 1),
    KernelTuning(64, 64, 3, 768, 16, 2),
]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """The parameters belong to the process."""
    yield
    for build in compiled_builds():
        apply(KernelTuning(), build)


class Case(NamedTuple):
    x: Tensor
    weight: QuantizedTensor
    expected: Tensor


@functools.cache
def int8_cases(activations: str) -> list[Case]:
    """Numbers of tokens on both sides of each border, blocks of inputs that end early, scales per group."""
    generator, made = torch.Generator().manual_seed(0), []
    for columns, size in ((2372, 0), (2304, 128), (2176, 64), (576, 96)):
        qweight = torch.randint(-128, 128, (70, columns), dtype=torch.int8, generator=generator)
        scale = torch.rand(70, columns // (size or columns), generator=generator)
        weight = QuantizedTensor(qweight, scale if size else scale.flatten())
        for num_tokens in (1, 2, 4, 5, 8, 16, 24, 64, 70):
            x = torch.randn(num_tokens, columns, generator=generator)
            made.append(Case(x, weight, ReferenceKernels(activations).linear(x, weight)))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["int16", "int8"])
@pytest.mark.parametrize("build", BUILDS)
def test_no_bit_depends_on_the_parameters(build: str, activations: str) -> None:
    is_emulated = build == "emulated amx"
    native = emulated_amx_kernels(activations) if is_emulated else NativeKernels(activations, build=build)
    native.set_num_threads(3)
    codes = [case for form in ("symmetric", "steps", "minima") for case in int4_cases(form, activations)]
    try:
        for tuning in TUNINGS:
            set_parameters(native._library.penstock_tune, tuning)
            for x, weight, expected in int8_cases(activations):
                assert torch.equal(native.linear(x, weight), expected), (tuning, len(x), weight.shape)
            for case in codes:
                found = native.linear(case.x, case.weight, case.bias)
                assert torch.equal(found, case.expected), (tuning, len(case.x), case.weight.shape)
    finally:
        set_parameters(native._library.penstock_tune, KernelTuning())
        native.set_num_threads(1)


def test_c_and_python_know_the_same_ranges() -> None:
    _, library = load_library(None)
    for place, (name, values) in enumerate(TUNING_RANGES.items()):
        for value in (values[0], values[-1]):
            assert library.penstock_tune(*astuple(replace(KernelTuning(), **{name: value}))) == 0
        wrong = {values[0] - values.step, values[-1] + values.step}
        for value in wrong | ({values[0] + values.step - 1} if values.step > 1 else set()):
            given = list(astuple(KernelTuning()))
            given[place] = value
            assert library.penstock_tune(*given) == place + 1
            with pytest.raises(ConfigError, match=f"{name} is {value}; it must be {values[0]} to"):
                KernelTuning(*given)
    with pytest.raises(ConfigError, match="the kernels refuse few_rows=32"):
        set_parameters(lambda *_: 3, KernelTuning())


def test_a_tuning_is_read_from_text() -> None:
    assert KernelTuning.parse("default") == KernelTuning()
    tuning = KernelTuning.parse(" few_rows = 8,prefetch_bytes=1024")
    assert tuning == KernelTuning(prefetch_bytes=1024, few_rows=8) == KernelTuning.parse(str(tuning))
    for text in ("", "few_rows", "rows=8", "few_rows=many", "few_rows=8,", "few_rows=-1"):
        with pytest.raises(ConfigError, match="write default, or for example"):
            KernelTuning.parse(text)
    with pytest.raises(ConfigError, match="--kernels torch .*--kernel-tuning"):
        EngineConfig(kernels="torch", kernel_tuning=tuning)


def test_without_native_kernels_a_tuning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "compiled_builds", list)
    assert choose_kernels(EngineConfig(device="cpu")).traits.name == "torch"
    config = EngineConfig(device="cpu", kernel_tuning=KernelTuning(few_rows=4))
    with pytest.raises(ConfigError, match="kernel_tuning is for native kernels, and none were compiled"):
        choose_kernels(config)


class Clocked:
    """Products that take a time of their own for each tuning, on a clock that only they move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.tuning = 0.0, KernelTuning()
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)

    def use(self, tuning: KernelTuning) -> None:
        self.tuning = tuning

    def linear(self, x: Tensor, weight: Matrix) -> None:
        t, rows, has_codes = self.tuning, 2 * len(x), isinstance(weight, Int4Tensor)
        assert x.shape[1] == weight.shape[1]
        seconds = 1e-2 + (1e-3 if t.prefetch_bytes != 4096 and not has_codes else 0)
        seconds += 1e-3 if has_codes and t.prefetch_bytes_int4 != 8192 else 0
        seconds += 1e-3 if rows > 8 and t.few_rows >= rows else 0  # packing pays from more than 8 rows on
        seconds += 1e-3 if rows <= 8 and t.few_rows < rows else 0
        seconds -= 1e-4 if t.panel_inputs == 1024 else 0  # 1% is noise
        self.now_s += seconds


def test_the_fastest_values_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked(monkeypatch)
    weights = [QuantizedTensor(torch.ones(4, 64, dtype=torch.int8), torch.ones(4))] * 2
    found = tune(trials("avx512", 8), clocked.linear, weights, 2, clocked.use)
    assert found == KernelTuning(4096, 8192, few_rows=8) == clocked.tuning
    assert clocked.now_s < 5


@pytest.mark.parametrize(("int8_s", "int4_s", "found"), [(0.6, 1.0, 4), (0.6, 1.5, 0), (0.95, 0.95, 0)])
def test_fewer_threads_are_for_products_of_both_formats(
    monkeypatch: pytest.MonkeyPatch, int8_s: float, int4_s: float, found: int
) -> None:
    """A second with all threads, and so many seconds with four of eight."""
    clocked = Clocked(monkeypatch)

    def linear(x: Tensor, weight: Matrix) -> None:
        with_four = int4_s if isinstance(weight, Int4Tensor) else int8_s
        clocked.now_s += with_four if clocked.tuning.read_threads == 4 else 1.0

    weights = [QuantizedTensor(torch.ones(4, 64, dtype=torch.int8), torch.ones(4))]
    threads = next(trial for trial in trials("avx2", 8) if trial.parameter == "read_threads")
    assert tune([threads], linear, weights, 2, clocked.use) == KernelTuning(read_threads=found)


def test_builds_are_tuned_in_what_they_have() -> None:
    assert {trial.parameter for trial in trials("avx512", 2)} == set(TUNING_RANGES)
    assert trials("avx2", 8)[1:] == [Trial("read_threads", (0, 6, 4), (2,), ("int8", "int4"), 0.9)]
    assert [trial.parameter for trial in trials("amx", 1)] == ["prefetch_bytes", "prefetch_bytes_int4"]
    for trial in trials("avx512", 64):
        assert trial.values[0] == getattr(KernelTuning(), trial.parameter), "the first value is the usual one"


def test_others_are_what_the_process_did_not_do() -> None:
    stat = "cpu 9 9 9 9\ncpu0 100 50 25 999 999 5 10 10 77 77\ncpu1 200 0 0 5\ncpu2 7 7 7 7\nintr 5\n"
    assert busy_seconds(stat, {0, 1}, 100) == 4.0
    before = Moment(clock_s=10.0, busy_s=5.0, own_s=1.0)
    assert others_share(before, Moment(12.0, 9.0, 4.0), 2) == 0.25
    assert others_share(before, Moment(12.0, 6.0, 4.0), 2) == 0.0
    assert others_share(before, Moment(12.0, 99.0, 4.0), 2) == 1.0


QUIET, BUSY = (KernelTuning(few_rows=8), 0.02), (KernelTuning(few_rows=4), 0.6)


def test_a_tuning_is_measured_once(tmp_path: Path) -> None:
    cache = tmp_path / "hardware.json"
    assert tuning_of("m", lambda: BUSY, cache) == BUSY
    assert tuning_of("m", lambda: QUIET, cache) == BUSY  # kept
    assert tuning_of("another machine", lambda: QUIET, cache) == QUIET
    assert tuning_of("m", lambda: QUIET, cache, is_forced=True) == QUIET
    assert tuning_of("m", lambda: BUSY, cache, is_forced=True) == BUSY
    assert tuning_of("m", lambda: BUSY, cache) == QUIET, "a busy hour replaced a quiet one"
    tuning_of("m", lambda: BUSY, cache, is_forced=True, keeps_better=False)
    assert tuning_of("m", lambda: QUIET, cache) == BUSY
    assert tunings_of_build(cache, "another") == [QUIET] and len(tunings_of_build(cache, "m")) == 2


@pytest.mark.parametrize("bad", [65, "16", 8.0, None])
def test_a_kept_value_that_is_out_of_range_is_measured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: object
) -> None:
    cache = tmp_path / "hardware.json"
    tuning_of("m", lambda: QUIET, cache)
    content = json.loads(cache.read_text())
    content["rates"]["tuning of m"]["few_rows"] = bad
    cache.write_text(json.dumps(content))
    assert tunings_of_build(cache, "m") == []
    assert tuning_of("m", lambda: BUSY, cache) == BUSY
    assert "ignored and measured again: kernel_tuning: few_rows is" in caplog.text
    assert tuning_of("m", lambda: QUIET, cache) == BUSY


@pytest.mark.parametrize("others", [0.05, 0.5])
def test_a_busy_hour_tunes_nothing(monkeypatch: pytest.MonkeyPatch, others: float) -> None:
    """Beside other work a single thread may be the fastest; the usual parameters serve."""
    moments = iter((Moment(0.0, 0.0, 0.0), Moment(1.0, 2.0 * others, 0.0)))
    monkeypatch.setattr(measure, "now", lambda: next(moments))
    monkeypatch.setattr(measure, "tune", lambda *_: QUIET[0])
    monkeypatch.setattr(measure, "_weights", list)
    tuning, share = measure._tune(EngineConfig(device="cpu"), compiled_builds()[0], 2)
    assert tuning == (QUIET[0] if others < 0.1 else KernelTuning()) and share == pytest.approx(others)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[KernelTuning | None]:
    """The tunings with which rates of products were measured."""
    found: list[KernelTuning | None] = []

    def products(config: EngineConfig, num_threads: int) -> ProductRates:
        found.append(config.kernel_tuning)
        return ((2, 5.0),)

    monkeypatch.setattr(measure, "_product_rates", products)
    monkeypatch.setattr(measure, "_memory_read_gbps", lambda num_threads: 5.0)
    monkeypatch.setattr(measure, "_tune", lambda *_: QUIET)
    return found


def test_rates_are_measured_with_the_tuning(asked: list[KernelTuning | None], tmp_path: Path) -> None:
    config, cache = EngineConfig(device="cpu"), tmp_path / "rates.json"
    build = native_build(config)
    for _ in range(2):
        assert measure.measure_hardware(None, config, cache).kernels == KernelProfile(build, *QUIET)
    given = KernelTuning(few_rows=2)
    by_hand = measure.measure_hardware(None, replace(config, kernel_tuning=given), cache)
    assert by_hand.kernels == KernelProfile(build, given, None) and asked == [QUIET[0], given]
    without = measure.measure_hardware(None, replace(config, kernels="torch"), cache)
    assert without.kernels == KernelProfile(None) and asked[2:] == [None]


def test_a_file_without_tuning_is_completed(asked: list[KernelTuning | None], tmp_path: Path) -> None:
    """As that of an earlier Penstock. The rates in the file stay."""
    config, cache = EngineConfig(device="cpu"), tmp_path / "rates.json"
    measure.measure_hardware(None, config, cache)
    rates = {key: value for key, value in kept_rates.read(cache).items() if "products" in value}
    kept_rates.write(cache, rates)
    found = measure.measure_hardware(None, config, cache)
    assert len(asked) == 1 and found.kernels is not None and found.kernels.tuning == QUIET[0]
    assert kept_rates.read(cache).items() > rates.items()


def test_an_engine_computes_with_the_tuning(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[KernelTuning] = []
    monkeypatch.setattr("penstock.kernels.tuning.apply", used.append)
    measured = KernelProfile(native_build(EngineConfig()), *QUIET)
    hardware = HardwareProfile(2, 8 << 30, 8 << 30, 10.0, 500.0, kernels=measured)
    given = KernelTuning(few_rows=2)
    for config in (EngineConfig(device="cpu"), EngineConfig(device="cpu", kernel_tuning=given)):
        Engine.load(tiny_llama, config, hardware=hardware).close()
    Engine.load(tiny_llama, EngineConfig(device="cpu")).close()
    assert used == [QUIET[0], given, KernelTuning()]
