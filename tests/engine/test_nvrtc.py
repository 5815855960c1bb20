"""Compiling the CUDA kernels: for every architecture, with whatever library there is, kept on disk."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.kernels import nvrtc
from penstock.kernels.cuda import SIGNATURES

ARCHITECTURES = (61, 70, 75, 80, 86, 89, 90)

needs_nvrtc = pytest.mark.skipif(
    nvrtc.find_nvrtc(61) is None, reason="no NVRTC of CUDA 12 (the extra nvrtc brings it)"
)


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_to_machine_code(architecture: int) -> None:
    image = nvrtc.compile_kernels(architecture)
    assert image[:4] == b"\x7fELF"
    kernels = set(re.findall(rb"\x00\.text\.(\w+)(?=\x00)", image))
    assert kernels == {name.encode() for name in SIGNATURES}


@needs_nvrtc
def test_a_card_newer_than_the_library_gets_ptx() -> None:
    library = nvrtc.find_nvrtc(61)
    assert library is not None
    target = library.target(max(library.architectures) + 10)
    assert target == f"compute_{max(library.architectures)}"
    assert b".entry rms_norm" in library.compile(nvrtc.source(), target)


def test_the_oldest_library_that_knows_a_card_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers run what is older than they are. A card that none knows takes the newest library."""
    libraries = []
    for version, architectures in (
        ((13, 5), (75, 90, 120)),
        ((12, 6), (61, 75, 90)),
        ((13, 0), (75, 90, 120)),
    ):
        libraries.append(nvrtc.Nvrtc.__new__(nvrtc.Nvrtc))
        libraries[-1].version, libraries[-1].architectures = version, frozenset(architectures)
    monkeypatch.setattr(nvrtc, "_libraries", lambda: tuple(libraries))
    for architecture, version in ((61, (12, 6)), (90, (12, 6)), (120, (13, 0)), (130, (13, 5))):
        found = nvrtc.find_nvrtc(architecture)
        assert found is not None and found.version == version
    assert nvrtc.find_nvrtc(70) is None


def test_a_card_without_8_bit_products_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"6\.0: 6\.1 is the oldest"):
        nvrtc.compile_kernels(60)


def test_without_a_library_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_libraries", lambda: ())
    with pytest.raises(ConfigError, match=r"7\.5.*pip install 'nvidia-cuda-nvrtc-cu12"):
        nvrtc.compile_kernels(75)


@needs_nvrtc
def test_an_error_carries_the_compilers_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "source", lambda: '#line 7 "some.cu"\n__global__ void f() { g(); }')
    with pytest.raises(ConfigError, match=r'(?s)sm_61.*some\.cu\(7\): error: identifier "g" is undefined'):
        nvrtc.compile_kernels(61)


@needs_nvrtc
def test_compiled_kernels_are_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "source", lambda: 'extern "C" __global__ void f() {}')
    first = nvrtc.compile_kernels(61, tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    assert kept.read_bytes() == first and "sm_61" in kept.name
    kept.write_bytes(b"seen")
    assert nvrtc.compile_kernels(61, tmp_path / "cache") == b"seen"
    assert nvrtc.compile_kernels(75, tmp_path / "cache") != b"seen"
    monkeypatch.setattr(nvrtc, "source", lambda: 'extern "C" __global__ void g() {}')
    assert nvrtc.compile_kernels(61, tmp_path / "cache") != b"seen"
    assert len(list((tmp_path / "cache").iterdir())) == 3


@needs_nvrtc
def test_a_cache_that_cannot_be_written_costs_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nvrtc, "source", lambda: 'extern "C" __global__ void f() {}')
    (tmp_path / "file").write_text("")
    assert nvrtc.compile_kernels(61, tmp_path / "file")[:4] == b"\x7fELF"
    assert "can't be kept" in caplog.text
