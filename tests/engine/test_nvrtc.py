"""Compiling the CUDA kernels: for every architecture, with whatever library there is, kept on disk."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from compiler_report import read_report

from penstock.errors import ConfigError
from penstock.kernels.cuda import nvrtc
from penstock.kernels.cuda.attention import ATTENTION_THREADS, LATENT_THREADS
from penstock.kernels.cuda.launcher import SIGNATURES, THREADS

ARCHITECTURES = (61, 70, 75, 80, 86, 89, 90)
#: Those that the tests compile for: the one for which these kernels are, and of the later ones that with the
#: least room on a multiprocessor. Run this file as a script to compile for all.
COMPILED = (61, 75)

needs_nvrtc = pytest.mark.skipif(
    nvrtc.find_nvrtc(61) is None, reason="no NVRTC of CUDA 12 (the extra nvrtc brings it)"
)


class Limits(NamedTuple):
    """How bad a kernel may be: on 6.1, for which these kernels are, and on any later architecture."""

    #: All of the name.
    kernels: str
    spill_bytes: tuple[int, int]
    #: At least so many blocks run on a multiprocessor at a time.
    num_blocks: tuple[int, int]
    reason: str


#: What NVRTC 12.6 reaches. Fewer blocks hide less of the memory's latency; a spill is memory's time.
LIMITS = (
    Limits("(planes_)?gemv_([12]_[12]|4_1)", (0, 0), (4, 4), "32 warps with loads under way keep DRAM busy"),
    Limits("(planes_)?gemv_(4_2|8_1|any_1)", (0, 0), (2, 2), "sums of 8 rows take more than 64 registers"),
    Limits("(planes_)?gemv_(8|any)_2", (0, 16), (2, 2), "sums of 16 rows: while 128 registers hold them"),
    Limits("(planes_)?tiled_4_[12]", (0, 0), (3, 2), "32 sums a thread: 80 registers make three blocks"),
    Limits("(planes_)?tiled_(8|any)_[12]", (0, 0), (2, 2), "64 sums a thread; later cards seldom come here"),
    Limits("(codes|(plane_)?groups)_gemv_.*", (0, 0), (3, 2), "a warp has 2 KB of weights on the way, or 1"),
    Limits("(codes|(plane_)?groups)_tiled_.*", (0, 0), (2, 2), "32 integer sums, 16 float64 totals a thread"),
    Limits("(codes|groups)_quantize_.*", (0, 0), (6, 4), "they wait for memory alone"),
    Limits("attention_64_8(_int8)?", (0, 0), (4, 4), "32 warps; shared memory holds more than registers do"),
    Limits("attention_64_32(_int8)?", (0, 0), (3, 3), "80 registers make three blocks"),
    Limits("attention_128_8(_int8)?", (8, 0), (4, 3), "four blocks: 64 registers; no spill in a loop"),
    Limits("attention_128_32(_int8)?", (0, 0), (2, 1), "shared memory holds two blocks, on 7.5 one"),
    Limits("attention_256_[48](_int8)?", (0, 0), (2, 1), "shared memory holds two blocks, on 7.5 one"),
    Limits("attention_latent", (0, 0), (2, 2), "shared memory holds three blocks, on 7.5 two"),
    Limits("write_kv_int8", (0, 0), (5, 4), "a division, a vector's largest number: 40 warps suffice"),
    Limits("recurrence_(64|(channels_)?any)", (0, 0), (3, 2), "32 numbers of a state in registers, or none"),
    Limits("recurrence_128", (0, 0), (2, 2), "64 numbers of a state in the registers of each thread"),
    Limits("recurrence_channels_128", (0, 0), (1, 1), "keys and decays, read ahead, take 90 registers more"),
    Limits("recurrence_256", (32, 0), (1, 1), "128 numbers: all the registers that a thread may have"),
    Limits("short_conv", (0, 0), (5, 4), "it waits for memory alone"),
    Limits("merge_splits", (0, 0), (8, 8), "of 4 warps each: latency is hidden by half of all warps"),
    Limits(
        "activation|combine_[12]|fetch|join_planes|layer_norm|rms_norm|quantize_[12]|rope|router_(logits|scores)|write_kv",
        (0, 0), (8, 4), "they wait for memory alone: all warps that there are (7.5 has 32)",
    ),
)  # fmt: skip


@functools.cache
def compiled(architecture: int) -> tuple[bytes, str]:
    """The image, and what the compiler says of it."""
    library = nvrtc.find_nvrtc(architecture)
    assert library is not None
    options = (*nvrtc.OPTIONS, "--ptxas-options=-v")
    return library.compile_with_log(nvrtc.source(), f"sm_{architecture}", options)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("architecture", COMPILED)
def test_kernels_have_the_room_that_they_need(architecture: int) -> None:
    """Registers, and shared memory: no more than any card gives a block without being asked."""
    library = nvrtc.find_nvrtc(architecture)
    assert library is not None
    if library.version != (12, 6):
        pytest.skip(f"the limits are NVRTC 12.6's, and this is {library.version}")
    report, is_later = read_report(compiled(architecture)[1]), architecture > 61
    assert set(report) == set(SIGNATURES)
    for name, kernel in report.items():
        (limits,) = (limits for limits in LIMITS if re.fullmatch(limits.kernels, name))
        most, least = limits.spill_bytes[is_later], limits.num_blocks[is_later]
        assert kernel.shared_bytes <= 48 << 10, name
        assert kernel.spill_bytes <= most, f"{name} spills {kernel.spill_bytes}: {limits.reason}"
        found = kernel.num_blocks(architecture, num_threads(name))
        assert found >= least, f"{found} blocks of {name}: {limits.reason}"


def num_threads(name: str) -> int:
    """Most that kernels/cuda gives a block."""
    if name == "attention_latent":
        return LATENT_THREADS
    if name.startswith("attention"):
        return ATTENTION_THREADS[int(name.split("_")[1])]
    return 128 if name == "merge_splits" else THREADS


@needs_nvrtc
def test_the_compiler_understands_all_kernels() -> None:
    """Its first half, which takes half a second; machine code takes half a minute."""
    library = nvrtc.find_nvrtc(61)
    assert library is not None
    options = (*nvrtc.OPTIONS, "--fdevice-syntax-only")
    library.compile_with_log(nvrtc.source(), "compute_61", options)
    with pytest.raises(ConfigError, match=r"elementwise\.cu"):
        library.compile_with_log(nvrtc.source().replace("float ", "flaot ", 1), "compute_61", options)


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("architecture", COMPILED)
def test_compiles_to_machine_code(architecture: int) -> None:
    image, _ = compiled(architecture)
    assert image[:4] == b"\x7fELF"
    kernels = set(re.findall(rb"\x00\.text\.(\w+)(?=\x00)", image))
    assert kernels == {name.encode() for name in SIGNATURES}


@needs_nvrtc
def test_a_card_newer_than_the_library_gets_ptx() -> None:
    library = nvrtc.find_nvrtc(61)
    assert library is not None
    target = library.target(max(library.architectures) + 10)
    assert target == f"compute_{max(library.architectures)}"
    assert b".entry f" in library.compile('extern "C" __global__ void f() {}', target)


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
    with pytest.raises(ConfigError, match=r"6\.0: cards before 6\.1"):
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


if __name__ == "__main__":
    for each in ARCHITECTURES:
        test_kernels_have_the_room_that_they_need(each)
        test_compiles_to_machine_code(each)
        print(f"sm_{each}: every kernel has the room that it needs")
