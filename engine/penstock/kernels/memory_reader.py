"""Readers of memory that do nothing but read, in C: what memory delivers at most."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

from torch import Tensor

from penstock.kernels.cpu_builds import compiled_builds, load_library

#: Gives the sum, modulo 2^64, of a buffer's words of 64 bits.
Reader = Callable[[Tensor], int]
#: Streams that each thread reads at a time, and the bytes ahead of which lines are prefetched (0: not at
#: all). Which variant is the fastest depends on the processor.
VARIANTS = tuple(itertools.product((1, 2, 4), (0, 2048)))


def memory_readers(num_threads: int, build: str | None = None) -> tuple[Reader, ...]:
    """A reader for each of VARIANTS, on `num_threads` threads, which the native kernels share; none where no
    native kernels were compiled."""
    if not compiled_builds():
        return ()
    _, library = load_library(build)
    library.penstock_set_num_threads(num_threads)
    return tuple(functools.partial(_read, library.penstock_read, *variant) for variant in VARIANTS)


def _read(read: Callable[..., int], streams: int, prefetch_bytes: int, buffer: Tensor) -> int:
    return read(buffer.data_ptr(), buffer.nbytes, streams, prefetch_bytes)
