"""What this machine delivers, measured: the one place that knows both memory and arithmetic."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from penstock.config import EngineConfig
from penstock.kernels import Kernels, QuantizedTensor, choose_kernels, fingerprint
from penstock.kernels.memory_reader import memory_readers
from penstock.memory.direct_io import aligned_buffer
from penstock.memory.hardware import HardwareProfile, Measure, ProductRates, capacities, hardware_profile
from penstock.memory.lane import find_lane
from penstock.memory.rates import device_gbps, measure_disk, memory_read_gbps

#: Products are measured with each of these numbers of tokens. They go through several matrices in turn, which
#: together are larger than any last-level cache.
PRODUCT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 256)
PRODUCT_SHAPE, NUM_PRODUCTS = (14336, 4096), 4
#: Most rounds for each number of tokens, and the seconds after which no other round begins.
PRODUCT_ROUNDS, PRODUCT_S = 4, 0.5


def measure_hardware(
    folder: Path | None,
    config: EngineConfig,
    cache: Path | None = None,
    is_forced: bool = False,
    keeps_better: bool = True,
    measures_disk: bool = True,
) -> HardwareProfile:
    """This machine, the GPU that the config comes to, and the disk under `folder`, with rates measured once
    for each set of kernels, precision of activations and number of threads, and kept in the file `cache`, as
    hardware_profile() says. If not `measures_disk`, the disk's rate is the one that is kept there, or none.
    Raises ConfigError if the config insists on kernels that are not there."""
    with contextlib.closing(find_lane(config.device)) as lane:
        hardware, measure = lane.describe(capacities()), _host_measure(config)
        if hardware.lane.has_own_memory:
            device, cache_folder = lane.torch_device, cache.parent if cache else None
            # The config's choice of kernels is about those of the GPU.
            measure = replace(
                _host_measure(replace(config, kernels="auto")),
                device_kernels=fingerprint(config, device),
                device=functools.partial(_device_rates, config, device, cache_folder),
            )
        if not measures_disk:
            measure = replace(measure, disk=None)
        return hardware_profile(folder, measure, cache, is_forced, hardware.device, keeps_better)


def _host_measure(config: EngineConfig) -> Measure:
    kernels = fingerprint(config) + (f", {config.num_threads} threads" if config.num_threads else "")
    products = functools.partial(_product_rates, config)
    return Measure(kernels, _memory_read_gbps, products, measure_disk)


def _memory_read_gbps(num_threads: int) -> float:
    return memory_read_gbps(num_threads, memory_readers(num_threads))


def _device_rates(config: EngineConfig, device: torch.device, cache_folder: Path | None) -> dict[str, float]:
    memory, link = device_gbps(device)
    gops = _device_gops(config, device, cache_folder)
    return {"memory_gbps": memory, "host_to_device_gbps": link, "int8_gops": gops}


def _product_rates(config: EngineConfig, num_threads: int) -> ProductRates:
    """The rates of products whose weights come from memory, as those of resident layers do, with the config's
    kernels. `num_threads` counts if the config does not say how many threads."""
    num_threads = config.num_threads or num_threads
    kernels = choose_kernels(config, num_threads)
    before = torch.get_num_threads()
    torch.set_num_threads(1 if kernels.traits.has_own_threads else num_threads)
    try:
        return _timed_products(kernels, config.rows_per_token)
    finally:
        torch.set_num_threads(before)


def _timed_products(kernels: Kernels, rows_per_token: int) -> ProductRates:
    out_features, in_features = PRODUCT_SHAPE
    matrix_bytes = out_features * in_features
    matrices = aligned_buffer(NUM_PRODUCTS * matrix_bytes).view(torch.int8).fill_(1)
    weights = [
        QuantizedTensor(matrix.view(PRODUCT_SHAPE), torch.ones(out_features))
        for matrix in torch.chunk(matrices, NUM_PRODUCTS)
    ]
    inputs = [torch.randn(num_tokens, in_features) for num_tokens in PRODUCT_TOKENS]
    times: list[list[float]] = [[] for _ in inputs]
    for _ in range(PRODUCT_ROUNDS):  # a machine that others share changes from moment to moment
        for x, found in zip(inputs, times, strict=True):
            for weight in weights if sum(found) < PRODUCT_S else ():
                started = time.perf_counter()
                kernels.linear(x, weight)
                found.append(time.perf_counter() - started)
    return tuple(
        (rows_per_token * len(x), matrix_bytes / statistics.median(found) / 1e9)
        for x, found in zip(inputs, times, strict=True)
    )


def _device_gops(config: EngineConfig, device: torch.device, cache_folder: Path | None) -> float:
    """What the config's product reaches on a block of a large model, in 1e9 INT8 operations a second."""
    kernels = choose_kernels(config, 1, device, cache_folder)
    qweight = torch.ones(4096, 4096, dtype=torch.int8, device=device)
    weight = QuantizedTensor(qweight, torch.ones(4096, device=device))
    x = torch.randn(256, 4096, device=device)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        kernels.linear(x, weight)[0, 0].item()  # waits for the GPU
        times.append(time.perf_counter() - started)
    return 2 * config.rows_per_token * 256 * 4096 * 4096 / min(times) / 1e9
