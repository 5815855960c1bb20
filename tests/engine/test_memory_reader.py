"""The C reader of memory: it reads every byte, in every variant and build."""

from __future__ import annotations

import pytest
import torch
from arm_kernels import BUILDS as ARM_BUILDS
from arm_kernels import arm_kernels

from penstock.kernels import memory_reader
from penstock.kernels.cpu_builds import compiled_builds
from penstock.kernels.memory_reader import VARIANTS, memory_readers


def numbers(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("build", compiled_builds())
@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_word_is_read_once(build: str, num_threads: int) -> None:
    """Also where lines are no multiple of the streams, and words no multiple of the lines."""
    for num_bytes in (0, 8, 64, 64 * 31 + 24, 1 << 16, (1 << 20) + 200):
        buffer = numbers(num_bytes)
        expected = int(buffer.view(torch.int64).sum())
        sums = [reader(buffer) for reader in memory_readers(num_threads, build)]
        assert sums == [expected] * len(VARIANTS), num_bytes


@pytest.mark.parametrize("build", [build for build in ARM_BUILDS if build == "neon"])
def test_the_arm_build_reads_every_word(build: str) -> None:
    buffer = numbers(64 * 31 + 24)
    library = arm_kernels(build)._library
    for streams, prefetch_bytes in VARIANTS:
        found = library.penstock_read(buffer.data_ptr(), buffer.nbytes, streams, prefetch_bytes)
        assert found == int(buffer.view(torch.int64).sum())


def test_without_native_kernels_there_is_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_reader, "compiled_builds", list)
    assert memory_readers(2) == ()
