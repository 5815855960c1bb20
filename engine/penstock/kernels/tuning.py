"""Tuning: parameters of the native kernels, set, and measured on the machine. No bit of a result depends on
them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernel_tuning import TUNING_RANGES, KernelTuning
from penstock.kernels.cpu_builds import load_library
from penstock.kernels.int4_tensor import Int4Tensor
from penstock.kernels.operands import Matrix, QuantizedTensor

#: The build in which all parameters count. In the other builds, prefetching and threads of one token are the
#: only choices that these products show.
_PACKING = "avx512"
#: The builds with vnni_factors.h.
_FACTORS = ("avx512", "amx")
#: A value replaces the usual one if products then take at most this share of the usual one's time. A smaller
#: gain may be noise.
_FASTER = 0.97
#: The same for fewer threads, which cost much where memory was slow for a moment only.
_FASTER_THREADS = 0.9
#: Most rounds of a trial, and the seconds after which no other round begins.
_ROUNDS, _TRIAL_S = 5, 0.7


@dataclass(frozen=True)
class Trial:
    """Values of a parameter that are compared, by products with these numbers of rows of integers and
    weights in these formats. Another value than the first has to take at most `share` of its time."""

    parameter: str
    values: tuple[int, ...]
    rows: tuple[int, ...]
    formats: tuple[Literal["int8", "int4"], ...] = ("int8",)
    share: float = _FASTER


def trials(build: str, num_threads: int) -> list[Trial]:
    """What is compared for a build, one after the other. Rows are even: a token may have two."""
    half, most = max(1, num_threads // 2), max(1, 3 * num_threads // 4)
    # Memory that one thread uses up in INT8 may wait for arithmetic in 4 bits.
    values = tuple(dict.fromkeys((0, most, half)))
    threads = Trial("read_threads", values, (2,), ("int8", "int4"), _FASTER_THREADS)
    found = [Trial("prefetch_bytes", (2048, 0, 1024, 4096), (2,)), *([threads] if num_threads > 1 else [])]
    if build in _FACTORS:
        found += [Trial("prefetch_bytes_int4", (12288, 16384, 8192, 4096, 0), (2,), ("int4",))]
    if build == _PACKING:
        found += [
            Trial("few_rows", (32, 16, 8, 64), (16, 32, 64)),
            Trial("lane_rows", (128, 64, 512), (128, 256)),
            Trial("panel_inputs", (2048, 1024), (1024,)),
        ]
    return found


def apply(tuning: KernelTuning, build: str | None = None) -> None:
    """Set the parameters of all native kernels of this process, as NativeKernels.set_num_threads() sets their
    threads. Raises ConfigError if the kernels refuse a value."""
    _, library = load_library(build)
    set_parameters(library.penstock_tune, tuning)


def set_parameters(penstock_tune: Callable[..., int], tuning: KernelTuning) -> None:
    if place := penstock_tune(*astuple(tuning)):
        name = list(TUNING_RANGES)[place - 1]
        raise ConfigError(f"the kernels refuse {name}={getattr(tuning, name)}")


def tune(
    candidates: Sequence[Trial],
    linear: Callable[[Tensor, Matrix], object],
    weights: Sequence[QuantizedTensor],
    rows_per_token: int,
    use: Callable[[KernelTuning], None] = apply,
) -> KernelTuning:
    """The fastest values by products of `weights`, matrices with rows of 32 n inputs that are together larger
    than the caches. Each trial goes on with the values that were found before. In the end the values found
    are in use."""
    found = KernelTuning()
    codes = [_as_codes(each) for each in weights]
    matrices: dict[str, Sequence[Matrix]] = {"int8": weights, "int4": codes}
    for trial in candidates:
        cases = [
            (torch.randn(rows // rows_per_token, width), matrices[kind])
            for kind, width in (("int8", weights[0].shape[1]), ("int4", codes[0].shape[1]))
            if kind in trial.formats
            for rows in trial.rows
        ]
        found = _fastest(trial, found, linear, cases, use)
    use(found)
    return found


def _fastest(
    trial: Trial,
    base: KernelTuning,
    linear: Callable[[Tensor, Matrix], object],
    cases: Sequence[tuple[Tensor, Sequence[Matrix]]],
    use: Callable[[KernelTuning], None],
) -> KernelTuning:
    """`base` with the value whose products take the least time. The first value counts as the usual one."""
    tunings = [replace(base, **{trial.parameter: value}) for value in trial.values]
    times: list[list[list[float]]] = [[[] for _ in cases] for _ in tunings]
    started, index = time.perf_counter(), 0
    for number in range(_ROUNDS):
        if number and time.perf_counter() - started > _TRIAL_S:
            break
        for which, (x, weights) in enumerate(cases):
            for tuning, samples in zip(tunings, times, strict=True):
                use(tuning)
                samples[which].append(_seconds(linear, x, weights[index % len(weights)]))
                index += 1
    costs = [sum(statistics.median(found) for found in samples) for samples in times]
    best = min(range(len(costs)), key=costs.__getitem__)
    return tunings[best if costs[best] <= trial.share * costs[0] else 0]


def _as_codes(weight: QuantizedTensor) -> Int4Tensor:
    """The same bytes as codes of twice as many inputs, with scales such as our own conversion makes: integers
    times a number of few bits."""
    rows, width = weight.qweight.shape
    return Int4Tensor(
        weight.qweight.view(torch.uint8), torch.full((rows, width // 32), 15 / 16).bfloat16(), 64
    )


def _seconds(linear: Callable[[Tensor, Matrix], object], x: Tensor, weight: Matrix) -> float:
    started = time.perf_counter()
    linear(x, weight)
    return time.perf_counter() - started
