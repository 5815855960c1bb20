"""What the doctor finds, on invented machines and on this one."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_folders import save_with_head
from pretended_card import missing, pretend

from penstock.kernel_tuning import KernelTuning
from penstock.memory.kept_tuning import tuning_of
from penstock.memory.lane import gpu_trouble
from penstock_server import cli
from penstock_server.commands import doctor

GIB = 2**30


def test_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = cli.main(["doctor", str(tmp_path)])
    text = capsys.readouterr().out
    assert code == int(any(line.startswith("!") for line in text.splitlines()))
    for subject in ("kernels", "drafts", "memory", "disk", "huge pages", "GPU"):
        assert subject in text
    assert not list(tmp_path.iterdir())


def test_kernels() -> None:
    assert "C compiler" in doctor.kernels([]).advice
    assert not doctor.kernels(["avx512", "avx2"], ["avx512", "avx2"]).advice
    assert not doctor.kernels(["amx"], ["amx", "avx512"]).advice
    assert "the processor has no amx or avx512 or" in doctor.kernels(["avx2", "generic"], ["avx2"]).text
    left_out = doctor.kernels(["avx512", "avx2"], ["amx", "avx512", "avx2"])
    assert "not compiled here: amx" in left_out.text and "processor has no" not in left_out.text
    assert "make install" in left_out.advice


def test_memory() -> None:
    assert doctor.memory(8 * GIB, GIB).advice and not doctor.memory(8 * GIB, 6 * GIB).advice
    assert "6.0 GiB of it free" in doctor.memory(8 * GIB, 6 * GIB).text


def test_disk_without_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.DirectReader, "is_direct", lambda *_: False)
    assert "ext4" in doctor.disk(tmp_path).advice
    assert "can't be written" in doctor.disk(tmp_path / "nothing").text
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    assert "ext4" in doctor.disk(model).advice, "the disk of a file is that of its folder"


def test_a_disk_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    found = doctor.disk(tmp_path)
    assert "Read-only file system" in found.text and "penstock doctor FOLDER" in found.advice


def test_huge_pages(tmp_path: Path) -> None:
    path = tmp_path / "enabled"
    path.write_text("always [madvise] never")
    assert not doctor.huge_pages(path).advice
    path.write_text("always madvise [never]")
    assert doctor.huge_pages(path).advice and doctor.huge_pages(tmp_path / "none").advice


def test_an_old_card_with_a_new_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernels(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "GTX 1060")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(doctor, "has_driver", lambda: True)
    monkeypatch.setattr(torch, "ones", no_kernels)
    (finding,) = doctor.gpu()
    assert "GTX 1060 (compute capability 6.1)" in finding.advice and "no kernel image" in finding.advice
    assert "torch 2.14 or older, for CUDA 12.6" in finding.advice


def test_a_card_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gpu_trouble", lambda number: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"RTX 30{6 + number}0")
    monkeypatch.setattr(doctor, "find_nvrtc", lambda architecture: object())
    assert doctor.gpu()[0] == doctor.Finding("GPU", "RTX 3060, compute capability 8.6")
    assert doctor.gpu()[1] == doctor.Finding("GPU", "cuda:1 is RTX 3070, for --device cuda:1")
    assert doctor.gpu(1)[0] == doctor.Finding("GPU", "RTX 3070, compute capability 8.6")
    assert all(finding.subject != "NVRTC" for finding in doctor.gpu())
    monkeypatch.setattr(doctor, "find_nvrtc", lambda architecture: None)
    (missing,) = (finding for finding in doctor.gpu() if finding.subject == "NVRTC")
    assert "pip install" in missing.advice


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_pretended_card(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The doctor computes on it, as the engine would."""
    with pretend((7, 5)) as card:
        cli.main(["doctor", str(tmp_path)])
        assert "ok GPU        Pretended GTX 1060, compute capability 7.5" in capsys.readouterr().out
        assert card.host_waits == ["a number"] and card.memory.used_bytes == 0
        card.is_there = False
        cli.main(["doctor", str(tmp_path)])
        assert "compute capability" not in capsys.readouterr().out
        assert "finds no GPU" in str(gpu_trouble())


def test_no_card() -> None:
    if not torch.cuda.is_available():
        (finding,) = doctor.gpu()
        assert not finding.advice or "driver" in finding.text


def test_rates_of_a_busy_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hardware.json"
    found = doctor.rates(cache, tmp_path)
    assert not found.advice and "at the first start" in found.text
    assert not doctor.rates(cache, tmp_path / "no such folder").advice
    for share, text in ((None, "were measured"), (0.05, "were measured"), (0.4, "took 40% of the cores")):
        monkeypatch.setattr(doctor, "kept_shares", lambda *_, kept=share: [0.0, kept])
        found = doctor.rates(cache, tmp_path)
        assert text in found.text and bool(found.advice) == (share == 0.4)
    assert f"`penstock hardware --remeasure {tmp_path}`" in found.advice


def test_a_tuning_of_a_busy_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hardware.json"
    monkeypatch.setattr(doctor, "build_fingerprint", lambda: "avx512 1234")
    assert not doctor.tuning(cache).advice and "at the first start" in doctor.tuning(cache).text
    tuning_of("cpu, avx512 1234", lambda: (KernelTuning(), 0.03), cache)
    assert not doctor.tuning(cache).advice and "were tuned" in doctor.tuning(cache).text
    tuning_of("cpu, avx512 1234 int8", lambda: (KernelTuning(), 0.4), cache)
    assert "other work took 40% of the cores" in doctor.tuning(cache).text
    assert "--remeasure" in doctor.tuning(cache).advice


def test_what_guesses_next_tokens(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hardware.json"
    assert "until this machine is measured" in doctor.drafts(cache, tiny_llama).text
    monkeypatch.setattr(doctor, "kept_shares", lambda *_: [0.0])
    model = tmp_path / "model"
    model.mkdir()
    save_with_head("GLM-4.5", model)
    for folder, text in (
        (tmp_path, "--draft-model names a small model that guesses, too"),
        (tiny_llama, "the model has no head of its own"),
        (model, "the model's head of multi-token prediction guesses, too"),
    ):
        found = doctor.drafts(cache, folder)
        assert text in found.text and not found.advice
    (model / "model.safetensors").unlink()
    assert "can't be opened" in doctor.drafts(cache, model).advice
