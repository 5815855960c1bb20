"""What this machine delivers, measured: the one place that knows both memory and arithmetic."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from penstock.config import CODE_GROUP_SIZES, EngineConfig
from penstock.kernel_tuning import KernelTuning
from penstock.kernels import (
    BatchLayout,
    Kernels,
    Matrix,
    QuantizedTensor,
    StateSlots,
    choose_kernels,
    fingerprint,
    native_build,
    use_processor,
)
from penstock.kernels.cpu import NativeKernels
from penstock.kernels.cuda.kept_check import card_identity
from penstock.kernels.memory_reader import memory_readers
from penstock.kernels.shared.handed_product import HandedProduct
from penstock.kernels.tuning import trials, tune
from penstock.memory.direct_io import aligned_buffer
from penstock.memory.hardware import (
    HardwareProfile,
    KernelProfile,
    ProductRates,
    capacities,
    num_physical_cores,
    threads_beside_a_card,
)
from penstock.memory.kept_tuning import tuning_of
from penstock.memory.lane import Lane, find_lane
from penstock.memory.machine_rates import Measure, hardware_profile, machine_key
from penstock.memory.other_work import is_busy, now, others_share
from penstock.memory.rates import (
    CROSSING_INPUTS,
    crossing_s,
    device_gbps,
    launch_s,
    measure_disk,
    memory_read_gbps,
)
from penstock.weights.checkpoints.gguf_files.block_types import BY_NAME
from penstock.weights.checkpoints.int4_form import Int4Form
from penstock.weights.formats.int4_format import OWN_DTYPE, Int4
from penstock.weights.formats.priced_formats import price_name
from penstock.weights.formats.weight_format import Int8, WeightFormat

#: Products are measured with each of these numbers of tokens. They go through several matrices in turn, which
#: together are larger than any last-level cache.
PRODUCT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 256)
PRODUCT_SHAPE, NUM_PRODUCTS = (14336, 4096), 4
#: Most rounds for each number of tokens, and the seconds after which no other round begins.
PRODUCT_ROUNDS, PRODUCT_S = 4, 0.5
#: The formats whose products are timed: those of GGUF's files, and our own with groups. INT8 with a scale for
#: each output channel is timed apart.
PRICED: tuple[WeightFormat, ...] = (
    Int8(32),
    Int8(128),
    Int4(Int4Form(64, OWN_DTYPE, has_steps=True)),
    *(
        Int4(Int4Form(CODE_GROUP_SIZES[name], OWN_DTYPE, codebook=name, has_steps=True))
        for name in ("int3", "int2")
    ),
    *(Int4(form) for name in ("Q4_0", "Q4_1", "Q4_K", "MXFP4") if (form := BY_NAME[name].form) is not None),
)
#: Each of PRICED is measured with these numbers of tokens, and no further round begins after so many seconds.
FORMAT_TOKENS, FORMAT_S = (1, 8, 32, 256), 0.06
#: Smaller matrices than above: there are many formats, and a start waits for all of them.
FORMAT_SHAPE, NUM_OF_FORMAT = (4096, 4096), 8

#: Heads of values and of keys, and the size of a head, of a state that is timed: Qwen3.5's. Together they
#: are larger than most caches.
STATE_HEADS, NUM_STATES = (32, 16, 128), 32
STATE_TOKENS = (1, 8, 64)


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
    hardware_profile() says, and the disk of --kv-spill if that is another one. If not `measures_disk`, the
    disk's rate is the one that is kept there, or none. Raises ConfigError if the config insists on kernels
    that are not there."""
    with contextlib.closing(find_lane(config.device)) as lane:
        hardware = lane.describe(capacities())
        # With a GPU, the config's choice of kernels is about those of the GPU.
        on_host = _beside_a_card(config) if hardware.lane.has_own_memory else config
        key = _host_key(on_host)
        kernels = _kernel_profile(on_host, key, cache, is_forced, keeps_better)
        products = functools.partial(_product_rates, replace(on_host, kernel_tuning=kernels.tuning))
        measure = Measure(key, _memory_read_gbps, products, measure_disk if measures_disk else None)
        if kernels.build is not None:  # the kernels of torch alone take the same for all formats
            tuned = replace(on_host, kernel_tuning=kernels.tuning)
            measure = replace(
                measure,
                formats=functools.partial(_format_rates, tuned),
                recurrence=functools.partial(_recurrence_rates, tuned),
            )
        if hardware.lane.has_own_memory:
            device, cache_folder = lane.torch_device, cache.parent if cache else None
            measure = replace(
                measure,
                device_kernels=f"{fingerprint(config, device)} on {card_identity(device)}",
                device=functools.partial(device_rates, config, device, cache_folder),
                crossing_s=functools.partial(card_crossing_s, lane, config, cache_folder),
                launch_s=functools.partial(card_launch_s, lane, config, cache_folder),
            )
        spill_folder = None if config.spill_folder is None else Path(config.spill_folder)
        profile = hardware_profile(
            folder, measure, cache, is_forced, hardware.device, keeps_better, spill_folder
        )
        return replace(profile, kernels=kernels)


def _beside_a_card(config: EngineConfig) -> EngineConfig:
    """The config of the processor's kernels, where a card has the config's own."""
    return replace(config, kernels="auto", num_threads=config.num_threads or threads_beside_a_card())


def _host_key(config: EngineConfig) -> str:
    """What tells apart rates of the processor's kernels, and tunings."""
    threads = f", {config.num_threads} threads" if config.num_threads else ""
    return fingerprint(config) + threads + (f", {config.kernel_tuning}" if config.kernel_tuning else "")


def _kernel_profile(
    config: EngineConfig, key: str, cache: Path | None, is_forced: bool, keeps_better: bool
) -> KernelProfile:
    """The processor's kernels with the tuning that the config gives, or else with the measured one, which is
    kept like a rate."""
    build, num_cores = native_build(config), num_physical_cores()
    if build is None or config.kernel_tuning is not None:
        return KernelProfile(build, config.kernel_tuning)
    measured = functools.partial(_tune, config, build, num_cores)
    tuning, share = tuning_of(machine_key(num_cores, key), measured, cache, is_forced, keeps_better)
    return KernelProfile(build, tuning, share)


def _tune(config: EngineConfig, build: str, num_cores: int) -> tuple[KernelTuning, float]:
    """The fastest parameters of the native kernels, and the share of the cores that others took meanwhile. If
    others took much, the usual parameters: a single thread may be the fastest in a busy hour alone."""
    num_threads = config.num_threads or num_cores
    use_processor(config, num_threads)
    kernels = choose_kernels(config)
    before = now()
    found = tune(trials(build, num_threads), kernels.linear, _weights(), config.rows_per_token)
    share = others_share(before, now(), num_cores)
    return (KernelTuning() if is_busy(share) else found), share


def _memory_read_gbps(num_threads: int) -> float:
    return memory_read_gbps(num_threads, memory_readers(num_threads))


def card_crossing_s(lane: Lane, config: EngineConfig, cache_folder: Path | None) -> float:
    """crossing_s() of the products that the config's kernels, and the processor's, share in a step."""
    fetch = getattr(choose_kernels(config, lane.torch_device, cache_folder), "fetch", None)
    return crossing_s(lane, product=_small_product(_beside_a_card(config)), fetch=fetch)


def card_launch_s(lane: Lane, config: EngineConfig, cache_folder: Path | None) -> float:
    """launch_s() of a small kernel of the config's: a product of few tokens, which is two launches."""
    kernels = choose_kernels(config, lane.torch_device, cache_folder)
    row = torch.zeros(1, CROSSING_INPUTS, device=lane.torch_device)
    qweight = torch.zeros(16, CROSSING_INPUTS, dtype=torch.int8, device=lane.torch_device)
    weight = QuantizedTensor(qweight, torch.ones(16, device=lane.torch_device))
    return launch_s(lane, lambda: kernels.linear(row, weight)) / 2


def _small_product(config: EngineConfig) -> HandedProduct | None:
    """A product for crossing_s(); None without compiled kernels."""
    use_processor(config, config.num_threads or num_physical_cores())
    kernels = choose_kernels(config)
    weight = QuantizedTensor(torch.zeros(16, CROSSING_INPUTS, dtype=torch.int8), torch.ones(16))
    return kernels.handed(weight) if isinstance(kernels, NativeKernels) else None


def device_rates(config: EngineConfig, device: torch.device, cache_folder: Path | None) -> dict[str, float]:
    """kept_rates.DEVICE_RATES of a GPU with the kernels that the config asks for."""
    memory, link = device_gbps(device)
    gops = _device_gops(config, device, cache_folder)
    return {"memory_gbps": memory, "host_to_device_gbps": link, "int8_gops": gops}


def _product_rates(config: EngineConfig, num_threads: int) -> ProductRates:
    """The rates of products whose weights come from memory, as those of resident layers do, with the config's
    kernels. `num_threads` counts if the config does not say how many threads."""
    num_threads = config.num_threads or num_threads
    use_processor(config, num_threads)
    kernels = choose_kernels(config)
    before = torch.get_num_threads()
    torch.set_num_threads(1 if kernels.traits.has_own_threads else num_threads)
    try:
        return _timed_products(kernels, config.rows_per_token)
    finally:
        torch.set_num_threads(before)


def _format_rates(config: EngineConfig, num_threads: int) -> dict[str, ProductRates]:
    """The same for weights in other formats, in elements, by price_name()."""
    use_processor(config, config.num_threads or num_threads)
    kernels = choose_kernels(config)
    inputs = [torch.randn(num_tokens, FORMAT_SHAPE[1]) for num_tokens in FORMAT_TOKENS]
    found = {}
    for kind in PRICED:
        weights = _random_matrices(kind)
        times = [_median_s(kernels, x, weights) for x in inputs]
        found[price_name(kind)] = tuple(
            (config.rows_per_token * len(x), math.prod(FORMAT_SHAPE) / seconds / 1e9)
            for x, seconds in zip(inputs, times, strict=True)
        )
    return found


def _recurrence_rates(config: EngineConfig, num_threads: int) -> ProductRates:
    """By the tokens of a sequence, 1e9 elements of its states a second."""
    use_processor(config, config.num_threads or num_threads)
    kernels, (heads, key_heads, dim) = choose_kernels(config), STATE_HEADS
    states, found = torch.zeros(NUM_STATES, heads, dim, dim), []
    for num_tokens in STATE_TOKENS:
        q, k = (torch.randn(num_tokens, key_heads, dim) for _ in range(2))
        v, gates = torch.randn(num_tokens, heads, dim), torch.rand(num_tokens, heads)
        times: list[float] = []
        for slot in range(NUM_STATES):
            if sum(times) < FORMAT_S:
                batch = _of_a_sequence(num_tokens, slot)
                started = time.perf_counter()
                kernels.recurrence(q, k, v, gates, gates, states, batch)
                times.append(time.perf_counter() - started)
        found.append((num_tokens, heads * dim * dim / statistics.median(times) / 1e9))
    return tuple(found)


def _of_a_sequence(num_tokens: int, slot: int) -> BatchLayout:
    """A step with tokens from the middle of a sequence whose state is in this slot."""

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    none, states = torch.zeros(0, dtype=torch.int64), integers()
    slots = StateSlots(integers(slot), integers(0, 0), states, states)
    starts, length = integers(0, num_tokens), integers(num_tokens + 1)
    return BatchLayout(none, none, integers().view(1, 0), starts, length, states=slots)


def _random_matrices(kind: WeightFormat) -> list[Matrix]:
    """Matrices of a format, which together are larger than any last-level cache."""
    components = kind.components(FORMAT_SHAPE)
    arrays = [each.view(torch.zeros(each.num_bytes, dtype=torch.uint8)) for each in components]
    kind.fill_random(arrays, torch.Generator().manual_seed(0))
    matrix = kind.operand(arrays)
    assert not isinstance(matrix, torch.Tensor)
    return [matrix.map(torch.Tensor.clone) for _ in range(NUM_OF_FORMAT)]


def _median_s(kernels: Kernels, x: torch.Tensor, weights: list[Matrix]) -> float:
    times: list[float] = []
    for weight in weights:
        if sum(times) < FORMAT_S:
            started = time.perf_counter()
            kernels.linear(x, weight)
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def _weights() -> list[QuantizedTensor]:
    out_features, in_features = PRODUCT_SHAPE
    matrices = aligned_buffer(NUM_PRODUCTS * out_features * in_features).view(torch.int8).fill_(1)
    return [
        QuantizedTensor(matrix.view(PRODUCT_SHAPE), torch.ones(out_features))
        for matrix in torch.chunk(matrices, NUM_PRODUCTS)
    ]


def _timed_products(kernels: Kernels, rows_per_token: int) -> ProductRates:
    out_features, in_features = PRODUCT_SHAPE
    matrix_bytes, weights = out_features * in_features, _weights()
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
    kernels = choose_kernels(config, device, cache_folder)
    qweight = torch.ones(4096, 4096, dtype=torch.int8, device=device)
    weight = QuantizedTensor(qweight, torch.ones(4096, device=device))
    x = torch.randn(256, 4096, device=device)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        kernels.linear(x, weight)[0, 0].item()  # waits for the GPU
        times.append(time.perf_counter() - started)
    return 2 * config.rows_per_token * 256 * 4096 * 4096 / min(times) / 1e9
