"""What is measured of products: the work that was really done, by the kernels that the config asks for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock import measure
from penstock.config import EngineConfig
from penstock.kernels import Matrix, cpu_builds, fingerprint
from penstock.kernels.cpu_builds import compiled_builds
from penstock.kernels.cuda import nvrtc
from penstock.kernels.reference import ReferenceKernels


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


def test_rates_are_those_of_the_kernels_that_the_config_asks_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each measured once, and none taken for another's; torch's threads are what they were."""
    asked: list[tuple[str, str, int, int]] = []

    def choose(config: EngineConfig, num_threads: int) -> ReferenceKernels:
        asked.append((config.kernels, config.activations, num_threads, torch.get_num_threads()))
        return Clocked(config.rows_per_token)

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
