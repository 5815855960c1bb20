"""Rates that disk, memory and link really deliver, measured here. A rate is the median of several rounds."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from penstock.errors import CapacityError
from penstock.memory.direct_io import DirectReader, aligned_buffer
from penstock.memory.hardware import DiskProfile
from penstock.memory.lane import Lane
from penstock.memory.pages import PAGE

#: Bytes per read and reads in flight that are tried. One read in flight is enough on an idle machine. Beside
#: computing threads the next read is asked for late, which costs 7% of the rate (measured on two cores).
BLOCKS = (1 << 20, 4 << 20, 16 << 20)
DEPTHS = (2, 4, 8)
ROUNDS = 3
#: Bytes that each trial reads. Where there is no file to read, one of eight times this size is written.
TRIAL_BYTES = 128 << 20
#: Bytes that are summed up: several times what the last-level caches hold.
MEMORY_BYTES = 512 << 20
#: Bytes that are copied to a GPU and within it.
DEVICE_BYTES = 256 << 20
#: Crossings from a GPU to the processor and back that follow each other, and the inputs of a row that
#: crosses.
NUM_CROSSINGS, CROSSING_INPUTS = 50, 4096
#: Launches that are timed together: fewer than a card takes in before a thread has to wait.
NUM_LAUNCHES = 100

#: Reads a buffer, in memory that the caller allocates.
Reader = Callable[[torch.Tensor], object]
#: Files, each with the number of its bytes that are whole pages.
Files = list[tuple[Path, int]]


def measure_disk(folder: Path, rounds: int = ROUNDS, trial_bytes: int = TRIAL_BYTES) -> DiskProfile:
    """Find the block size and the depth at which the disk under `folder` is read fastest.

    Each trial reads another part of the weights in the folder. Where the weights are too few, the trials read
    a file of 1 GiB, which is written for them and removed. Raises CapacityError if there are neither enough
    weights nor room for such a file.
    """
    samples: dict[tuple[int, int], list[float]] = {}
    buffer = aligned_buffer(trial_bytes)
    with _readable_files(folder, trial_bytes) as files:
        span, position = sum(size for _, size in files) - trial_bytes, 0
        for _ in range(rounds):
            for choice in itertools.product(BLOCKS, DEPTHS):
                with DirectReader(*choice) as reader:
                    is_direct = all([reader.is_direct(path) for path, _ in files])
                    pieces = pieces_at(files, position, trial_bytes)
                    started = time.perf_counter()
                    _read_all(reader, pieces, buffer)
                    rate = trial_bytes / (time.perf_counter() - started)
                samples.setdefault(choice, []).append(rate)
                position = (position + trial_bytes) % (span + 1) // PAGE * PAGE
    medians = {choice: statistics.median(rates) for choice, rates in samples.items()}
    # Of the choices that are as good as the best: the fewest reads in flight, then the smallest blocks.
    best = max(medians.values())
    block_bytes, depth = min(
        (choice for choice, rate in medians.items() if rate >= 0.97 * best), key=lambda c: (c[1], c[0])
    )
    return DiskProfile(best / 1e9, block_bytes, depth, is_direct)


def is_measurable(folder: Path, trial_bytes: int = TRIAL_BYTES) -> bool:
    """Whether measure_disk() would read the weights in `folder`. The folder may be a file."""
    return sum(size for _, size in _weights(folder)) >= 2 * trial_bytes


def _weights(folder: Path) -> Files:
    found = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    sizes = [(path, path.stat().st_size // PAGE * PAGE) for path in found]
    return [(path, size) for path, size in sizes if size]


def pieces_at(files: Files, position: int, num_bytes: int) -> list[tuple[Path, int, int]]:
    """(file, offset, bytes) of each piece of the `num_bytes` from `position` on, where `position` counts
    through the files one after the other."""
    pieces, start = [], 0
    for path, size in files:
        first, end = max(position, start), min(position + num_bytes, start + size)
        if first < end:
            pieces.append((path, first - start, end - first))
        start += size
    return pieces


def _read_all(reader: DirectReader, pieces: list[tuple[Path, int, int]], buffer: torch.Tensor) -> None:
    """Submit all pieces at once, as a streamed model submits its next layers, and wait for them."""
    done, futures = 0, []
    for path, offset, num_bytes in pieces:
        futures.append(reader.submit(path, offset, num_bytes, buffer[done:]))
        done += num_bytes
    for future in futures:
        future.result()


@contextlib.contextmanager
def _readable_files(folder: Path, least_bytes: int) -> Iterator[Files]:
    if is_measurable(folder, least_bytes):
        yield _weights(folder)
        return
    folder = folder.parent if folder.is_file() else folder
    path = folder / f".penstock-disk-trial-{os.getpid()}"
    size = 8 * least_bytes
    status = os.statvfs(folder)
    if status.f_bavail * status.f_frsize < 2 * size:
        raise CapacityError(
            f"there is no room to measure the disk under {folder}: {2 * size} bytes should be free; delete "
            "something there, or choose a folder with weights"
        )
    with path.open("wb") as stream:
        path.unlink()  # so that a signal in the middle leaves nothing behind
        # A GiB of random bytes takes up to 10 s. 1 MiB, turned by a byte more each time, has no page that a
        # file system would find again.
        noise = memoryview(os.urandom(1 << 20))
        for turn in range(size // len(noise)):
            stream.write(noise[turn:])
            stream.write(noise[:turn])
        stream.flush()
        os.fsync(stream.fileno())
        yield [(Path(f"/proc/self/fd/{stream.fileno()}"), size)]


def memory_read_gbps(
    num_threads: int,
    readers: Sequence[Reader] = (),
    num_bytes: int = MEMORY_BYTES,
    rounds: int = 3,
) -> float:
    """1e9 bytes a second that `num_threads` threads read of a buffer, by the fastest of `readers`, which are
    called in turn. Without readers, torch sums up the buffer."""
    buffer = aligned_buffer(num_bytes).fill_(1)
    with contextlib.ExitStack() as undo:
        readers = readers or (undo.enter_context(_torch_sum(num_threads)),)
        times: list[list[float]] = [[] for _ in readers]
        for _ in range(rounds + 1):
            for reader, found in zip(readers, times, strict=True):
                started = time.perf_counter()
                reader(buffer)
                found.append(time.perf_counter() - started)
    return num_bytes / min(statistics.median(found[1:]) for found in times) / 1e9


@contextlib.contextmanager
def _torch_sum(num_threads: int) -> Iterator[Reader]:
    """Threads of ours, each of which sums up its part of a buffer."""
    before = torch.get_num_threads()
    try:
        # Each of our threads gets one torch thread: more of them would share out each sum once more.
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as threads:
            yield lambda buffer: list(threads.map(torch.sum, buffer.view(torch.int64).chunk(num_threads)))
    finally:
        torch.set_num_threads(before)


def device_gbps(device: torch.device, num_bytes: int = DEVICE_BYTES, rounds: int = 5) -> tuple[float, float]:
    """1e9 bytes a second of a GPU's memory, where a copy counts as reading and writing; and of copies from
    pinned memory to the GPU."""
    target = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    other = torch.zeros_like(target)
    pinned = torch.zeros(num_bytes, dtype=torch.uint8).pin_memory()
    within = _median_copy_s(target, other, rounds)
    return 2 * num_bytes / within / 1e9, num_bytes / _median_copy_s(target, pinned, rounds) / 1e9


def _median_copy_s(target: torch.Tensor, source: torch.Tensor, rounds: int) -> float:
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize(target.device)
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(target.device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def launch_s(lane: Lane, launch: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Seconds in which a thread launches what launch() does, on a GPU that has nothing else to do. The
    thread does not wait for the GPU."""
    times = []
    for _ in range(rounds + 1):
        lane.link.synchronize()
        started = time.perf_counter()
        for _ in range(NUM_LAUNCHES):
            launch()
        times.append((time.perf_counter() - started) / NUM_LAUNCHES)
    lane.link.synchronize()
    return statistics.median(times[1:])


def crossing_s(lane: Lane, rounds: int = ROUNDS, product: Any = None, fetch: Any = None) -> float:
    """Seconds of handing a row over from a GPU to the processor and back. The processor does nothing, or a
    small `product` (HandedProduct) of CROSSING_INPUTS inputs, called as products of a layer are, whose result
    the card's `fetch` brings. A crossing waits for the one before it, as the products of a layer do."""
    handover, times = lane.handover(), []
    row = torch.zeros(1, CROSSING_INPUTS, device=lane.torch_device)
    out_features = CROSSING_INPUTS if product is None else product.out_features
    for _ in range(rounds + 1):
        lane.link.synchronize()
        started = time.perf_counter()
        for _ in range(NUM_CROSSINGS):
            handover.begin(row, out_features, lambda rows: rows, product, fetch)
            handover.join()
        lane.link.synchronize()
        times.append((time.perf_counter() - started) / NUM_CROSSINGS)
    handover.check()
    return statistics.median(times[1:])
