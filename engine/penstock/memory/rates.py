"""What disk and memory really deliver: measured on the spot, medians of interleaved rounds."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from penstock.errors import CapacityError
from penstock.memory.direct_io import DirectReader, aligned_buffer
from penstock.memory.hardware import DiskProfile
from penstock.memory.pages import PAGE

#: What is tried: bytes per read and reads in flight. One at a time does on an idle machine; beside computing
#: threads the next one is asked for late, which costs 7% of the rate (measured on two cores).
BLOCKS = (1 << 20, 4 << 20, 16 << 20)
DEPTHS = (2, 4, 8)
ROUNDS = 3
#: Read in each trial; eight times as much is written when there is no file to read.
TRIAL_BYTES = 128 << 20
#: Several times what the last-level caches hold.
MEMORY_BYTES = 512 << 20
#: Copied to a GPU and within it.
DEVICE_BYTES = 256 << 20


def measure_disk(folder: Path, rounds: int = ROUNDS, trial_bytes: int = TRIAL_BYTES) -> DiskProfile:
    """Find the block size and the depth at which the disk under `folder` is read fastest.

    Reads the largest safetensors file there, from another place each time, or a file of 1 GiB that it
    writes and removes. Raises CapacityError if there is neither a file nor room for one.
    """
    samples: dict[tuple[int, int], list[float]] = {}
    buffer = aligned_buffer(trial_bytes)
    with _readable_file(folder, trial_bytes) as path:
        span = path.stat().st_size // PAGE * PAGE - trial_bytes
        position, is_direct = 0, True
        for _ in range(rounds):
            for block_bytes in BLOCKS:
                for depth in DEPTHS:
                    with DirectReader(block_bytes, depth) as reader:
                        is_direct = reader.is_direct(path)
                        started = time.perf_counter()
                        reader.submit(path, position, trial_bytes, buffer).result()
                        rate = trial_bytes / (time.perf_counter() - started)
                    samples.setdefault((block_bytes, depth), []).append(rate)
                    position = (position + trial_bytes) % (span + 1) // PAGE * PAGE
    medians = {choice: statistics.median(rates) for choice, rates in samples.items()}
    # Of those that are as good as the best, the one with the fewest reads in flight, then the smallest.
    best = max(medians.values())
    block_bytes, depth = min(
        (choice for choice, rate in medians.items() if rate >= 0.97 * best), key=lambda c: (c[1], c[0])
    )
    return DiskProfile(best / 1e9, block_bytes, depth, is_direct)


def largest_file(folder: Path, trial_bytes: int = TRIAL_BYTES) -> Path | None:
    """The weights that measure_disk() would read; None if they are too few. `folder` may be a file."""
    found = [folder] if folder.is_file() else folder.glob("*.safetensors")
    files = [path for path in found if path.stat().st_size >= 2 * trial_bytes]
    return max(files, key=lambda path: path.stat().st_size, default=None)


@contextlib.contextmanager
def _readable_file(folder: Path, least_bytes: int) -> Iterator[Path]:
    found = largest_file(folder, least_bytes)
    if found is not None:
        yield found
        return
    folder = folder.parent if folder.is_file() else folder
    path = folder / f".penstock-disk-trial-{os.getpid()}"
    size = 8 * least_bytes
    status = os.statvfs(folder)
    if status.f_bavail * status.f_frsize < 2 * size:
        raise CapacityError(f"no room to measure the disk under {folder}: {2 * size} bytes should be free")
    with path.open("wb") as stream:
        path.unlink()  # a signal in the middle leaves nothing behind
        for _ in range(size // (1 << 20)):
            stream.write(os.urandom(1 << 20))
        stream.flush()
        os.fsync(stream.fileno())
        yield Path(f"/proc/self/fd/{stream.fileno()}")


def memory_read_gbps(num_threads: int, num_bytes: int = MEMORY_BYTES, rounds: int = 5) -> float:
    """1e9 bytes a second of `num_threads` threads that each sum up their part of a buffer."""
    parts = aligned_buffer(num_bytes).fill_(1).view(torch.int64).chunk(num_threads)
    before = torch.get_num_threads()
    times = []
    try:
        # One torch thread in each of ours: torch's own would share out each sum once more.
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as threads:
            for _ in range(rounds + 1):
                started = time.perf_counter()
                list(threads.map(torch.sum, parts))
                times.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(before)
    return num_bytes / statistics.median(times[1:]) / 1e9


def device_gbps(device: torch.device, num_bytes: int = DEVICE_BYTES, rounds: int = 5) -> tuple[float, float]:
    """1e9 bytes a second of a GPU's memory (the reading and the writing of a copy) and of copies to it from
    pinned memory."""
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
