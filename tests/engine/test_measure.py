"""What is measured of products: the work that was really done, and by which kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock import measure
from penstock.kernels import QuantizedTensor, cpu
from penstock.kernels.cpu import fingerprint


class Clocked:
    """Kernels with a clock of their own: 1 ms and 2 us per row of integers for each MB of weights."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def linear(self, x: torch.Tensor, weight: QuantizedTensor) -> None:
        self.now_s += weight.qweight.numel() / 1e6 * (1e-3 + 2e-6 * 2 * len(x))


def test_products_have_the_rates_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked()
    monkeypatch.setattr(measure, "choose_kernels", lambda *_: clocked)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clocked.now_s)
    monkeypatch.setattr(measure, "PRODUCT_SHAPE", (96, 64))
    rates = measure._product_rates(1)
    assert [rows for rows, _ in rates] == [2 * num_tokens for num_tokens in measure.PRODUCT_TOKENS]
    for rows, gbps in rates:
        assert gbps == pytest.approx(1e-3 / (1e-3 + 2e-6 * rows))


def test_other_kernels_have_another_fingerprint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled = fingerprint()
    monkeypatch.setattr(cpu, "_library_path", lambda build: tmp_path / build)
    found = set()
    for code in (b"one", b"two"):
        for build, _ in cpu.BUILDS:
            (tmp_path / build).write_bytes(code)
        found.add(fingerprint())
    monkeypatch.setattr(cpu, "_library_path", lambda build: None)
    assert len({compiled, *found, fingerprint()}) == 4
    assert fingerprint() == f"torch {torch.__version__}"
