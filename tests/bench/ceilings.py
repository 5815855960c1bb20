"""What this machine can do at most, measured with whatever is fastest at it."""

from __future__ import annotations

import ctypes
import functools
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import torch

from penstock.kernels import QuantizedTensor
from penstock.kernels.cpu import NativeKernels
from penstock.kernels.cpu_builds import compiled_builds
from penstock.kernels.memory_reader import memory_readers
from penstock.memory.direct_io import aligned_buffer
from penstock.memory.hardware import num_physical_cores

#: Together larger than any last-level cache here.
NUM_MATRICES, ROWS, COLUMNS = 12, 11264, 2048


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    """After one call that is not counted."""
    function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def weights(num_matrices: int, rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """Random INT8 matrices in memory like that of an engine's weights: huge pages, if the system has them."""
    buffer = aligned_buffer(num_matrices * rows * columns)[: num_matrices * rows * columns].view(torch.int8)
    return buffer.view(num_matrices, rows, columns).random_(-127, 128).unbind()


def memory_read_gbps(repeats: int = 5) -> float:
    """GB/s of the fastest reader over 277 MB: our reader in each of its variants, and in turn a sum of int64,
    torch's INT8 matrix-vector product, ours."""
    matrices = weights(NUM_MATRICES, ROWS, COLUMNS)
    total = NUM_MATRICES * ROWS * COLUMNS
    x8 = torch.randint(-127, 128, (1, COLUMNS), dtype=torch.int8)
    readers: list[Callable[[], object]] = [
        lambda: [matrix.view(torch.int64).sum() for matrix in matrices],
        lambda: [torch._int_mm(x8, matrix.t()) for matrix in matrices],
    ]
    if compiled_builds():
        readers += [
            lambda reader=reader: [reader(matrix) for matrix in matrices]
            for reader in memory_readers(num_physical_cores())
        ]
        native, x, scale = NativeKernels("int8"), torch.randn(1, COLUMNS), torch.ones(ROWS)
        readers.append(lambda: [native.linear(x, QuantizedTensor(m, scale)) for m in matrices])
    return total / min(median_seconds(reader, repeats) for reader in readers) / 1e9


#: Flags of the compiler, and operations per round of peak.c: 12 * 64 pairs of INT8, or 12 * 16 of int16,
#: which stand for two rows of INT8 each; 12 * 16 or 12 * 8 floats.
PEAKS = {
    "avx512": (["-mavx512f", "-mavx512vnni"], 12 * 64 * 2, 12 * 16 * 2),
    "avx2": (["-mavx2", "-mfma"], 12 * 16 * 2 * 2, 12 * 8 * 2),
}


def int8_gops(num_threads: int, repeats: int = 5, build: str | None = None) -> float:
    """10^9 INT8 multiplications and additions a second: what the cores do on registers alone (peak.c) with
    the instructions of that build of cpu.c (the best one that there is), where there is a compiler; otherwise
    the faster of torch's products of [1024, 2048] by [2048, 11264], plain and prepacked."""
    build = build or next(iter(compiled_builds()), "generic")
    peak = _peak(build, "penstock_peak") if build in PEAKS else None
    if peak is None:
        return _gemm_gops(repeats)
    return _rounds_per_s(peak, num_threads, repeats) * PEAKS[build][1] / 1e9


def float_gflops(num_threads: int, build: str, repeats: int = 5) -> float:
    """10^9 float32 multiplications and additions a second, likewise; 0 where peak.c can't tell."""
    build = "avx512" if build == "amx" else build
    peak = _peak(build, "penstock_peak_floats") if build in PEAKS else None
    if peak is None:
        return 0.0
    return _rounds_per_s(peak, num_threads, repeats) * PEAKS[build][2] / 1e9


def _rounds_per_s(peak: Callable[[int], object], num_threads: int, repeats: int) -> float:
    """Rounds a second, of all threads together."""
    rounds = 2_000_000
    with ThreadPoolExecutor(num_threads) as threads:
        seconds = median_seconds(lambda: list(threads.map(peak, [rounds] * num_threads)), repeats)
    return num_threads * rounds / seconds


@functools.cache
def _peak(build: str, name: str) -> Callable[[int], object] | None:
    """A function of peak.c, compiled for that build; None without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/peak.so"
        source = str(Path(__file__).parent / "peak.c")
        subprocess.run(
            [compiler, "-O3", *PEAKS[build][0], "-shared", "-fPIC", source, "-o", library], check=True
        )
        peak = getattr(ctypes.CDLL(library), name)
    peak.argtypes = (ctypes.c_int64,)
    return cast(Callable[[int], object], peak)


def _gemm_gops(repeats: int) -> float:
    weight = torch.randint(-127, 128, (ROWS, COLUMNS), dtype=torch.int8)
    x = torch.randint(-127, 128, (1024, COLUMNS), dtype=torch.int8)
    contenders: list[Callable[[], object]] = [lambda: torch._int_mm(x, weight.t())]
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    unsigned = (x.to(torch.int16) + 128).to(torch.uint8)
    ones, zeros = torch.ones(ROWS), torch.zeros(ROWS, dtype=torch.int32)
    contenders.append(
        lambda: torch.ops.onednn.qlinear_pointwise(
            unsigned, 1.0, 128, packed, ones, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
    )
    fastest = min(median_seconds(contender, repeats) for contender in contenders)
    return 2 * 1024 * ROWS * COLUMNS / fastest / 1e9
