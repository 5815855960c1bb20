"""Tuning: parameters of the native kernels, set, and measured on the machine. No bit of a result depends on
them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernel_tuning import TUNING_RANGES, KernelTuning
from penstock.kernels.cpu_builds import load_library
from penstock.kernels.operands import QuantizedTensor

#: The build in which all parameters count. In the other builds, prefetching and threads of one token are the
#: only choices that a product of INT8 shows.
_PACKING = "avx512"
#: A value replaces the usual one if products then take at most this share of the usual one's time. A smaller
#: gain may be noise.
_FASTER = 0.97
#: Most rounds of a trial, and the seconds after which no other round begins.
_ROUNDS, _TRIAL_S = 5, 0.7


@dataclass(frozen=True)
class Trial:
    """Values of a parameter that are compared, by products with these numbers of rows of integers."""

    parameter: str
    values: tuple[int, ...]
    rows: tuple[int, ...]


def trials(build: str, num_threads: int) -> list[Trial]:
    """What is compared for a build, one after the other. Rows are even: a token may have two."""
    half, most = max(1, num_threads // 2), max(1, 3 * num_threads // 4)
    threads = Trial("read_threads", tuple(dict.fromkeys((0, most, half))), (2,))
    found = [Trial("prefetch_bytes", (2048, 0, 1024, 4096), (2,)), *([threads] if num_threads > 1 else [])]
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
    linear: Callable[[Tensor, QuantizedTensor], object],
    weights: Sequence[QuantizedTensor],
    rows_per_token: int,
    use: Callable[[KernelTuning], None] = apply,
) -> KernelTuning:
    """The fastest values by products of `weights`, matrices that are together larger than the caches. Each
    trial goes on with the values that were found before. In the end the values found are in use."""
    found = KernelTuning()
    for trial in candidates:
        found = _fastest(trial, found, linear, weights, rows_per_token, use)
    use(found)
    return found


def _fastest(
    trial: Trial,
    base: KernelTuning,
    linear: Callable[[Tensor, QuantizedTensor], object],
    weights: Sequence[QuantizedTensor],
    rows_per_token: int,
    use: Callable[[KernelTuning], None],
) -> KernelTuning:
    """`base` with the value whose products take the least time. The first value counts as the usual one."""
    inputs = [torch.randn(rows // rows_per_token, weights[0].shape[1]) for rows in trial.rows]
    tunings = [replace(base, **{trial.parameter: value}) for value in trial.values]
    times: list[list[list[float]]] = [[[] for _ in inputs] for _ in tunings]
    started, index = time.perf_counter(), 0
    for number in range(_ROUNDS):
        if number and time.perf_counter() - started > _TRIAL_S:
            break
        for which, x in enumerate(inputs):
            for tuning, samples in zip(tunings, times, strict=True):
                use(tuning)
                samples[which].append(_seconds(linear, x, weights[index % len(weights)]))
                index += 1
    costs = [sum(statistics.median(found) for found in samples) for samples in times]
    best = min(range(len(costs)), key=costs.__getitem__)
    return tunings[best if costs[best] <= _FASTER * costs[0] else 0]


def _seconds(
    linear: Callable[[Tensor, QuantizedTensor], object], x: Tensor, weight: QuantizedTensor
) -> float:
    started = time.perf_counter()
    linear(x, weight)
    return time.perf_counter() - started
