"""What this machine delivers, measured: the one place that knows both memory and arithmetic."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from penstock.config import DeviceChoice, EngineConfig
from penstock.kernels import QuantizedTensor, choose_kernels
from penstock.kernels.cpu import fingerprint
from penstock.memory.device import find_device
from penstock.memory.direct_io import aligned_buffer
from penstock.memory.hardware import HardwareProfile, Measure, ProductRates, hardware_profile
from penstock.memory.rates import device_gbps, measure_disk, memory_read_gbps

#: Products are measured with so many tokens, by matrices in turn, together larger than any last-level cache.
PRODUCT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 256)
PRODUCT_SHAPE, NUM_PRODUCTS = (14336, 4096), 4
#: No other round with as many tokens after so long.
PRODUCT_ROUNDS, PRODUCT_S = 4, 0.5


def measure_hardware(
    folder: Path | None,
    cache: Path | None = None,
    is_forced: bool = False,
    choice: DeviceChoice = "cpu",
    keeps_better: bool = True,
    measures_disk: bool = True,
) -> HardwareProfile:
    """This machine, the GPU that the choice comes to, and the disk under `folder`, with rates measured once
    and kept in the file `cache`, as hardware_profile() says. If not `measures_disk`, the disk's rate is the
    one that is kept there, or none."""
    device = find_device(choice)

    def measure_device() -> dict[str, float]:
        assert device is not None
        memory, link = device_gbps(device.torch_device)
        gops = _device_gops(device.torch_device, cache.parent if cache else None)
        return {"memory_gbps": memory, "host_to_device_gbps": link, "int8_gops": gops}

    disk = measure_disk if measures_disk else None
    measure = Measure(fingerprint(), memory_read_gbps, _product_rates, disk, measure_device)
    profile = device.profile() if device else None
    return hardware_profile(folder, measure, cache, is_forced, profile, keeps_better)


def _product_rates(num_threads: int) -> ProductRates:
    """What our own products reach with weights that come from memory, as those of resident layers do."""
    kernels = choose_kernels(EngineConfig(), num_threads)
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
                kernels.int8_linear(x, weight)
                found.append(time.perf_counter() - started)
    return tuple(
        (2 * len(x), matrix_bytes / statistics.median(found) / 1e9)  # two rows of integers for each token
        for x, found in zip(inputs, times, strict=True)
    )


def _device_gops(device: torch.device, cache_folder: Path | None) -> float:
    """What our own product reaches on a block of a large model, in 1e9 INT8 operations a second."""
    kernels = choose_kernels(EngineConfig(), 1, device, cache_folder)
    qweight = torch.ones(4096, 4096, dtype=torch.int8, device=device)
    weight = QuantizedTensor(qweight, torch.ones(4096, device=device))
    x = torch.randn(256, 4096, device=device)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        kernels.int8_linear(x, weight)[0, 0].item()  # waits for the GPU
        times.append(time.perf_counter() - started)
    return 2 * 2 * 256 * 4096 * 4096 / min(times) / 1e9  # two rows of integers for each token
