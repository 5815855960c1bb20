"""How many threads torch computes with. Threads that meet after each small operation would wait longer than
they compute, and much longer where other processes want the cores as well: a thread that has lost its core
comes some milliseconds late, and all others wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from penstock.memory.hardware import num_physical_cores

#: Multiplications and additions between two meetings of threads that are worth the wait. One core takes some
#: 20 ms for them.
WORTH = 1e9
#: Columns of a matrix that a factorization computes between two meetings.
COLUMNS = 128


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Let torch compute with so many threads in the `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def threads_for(num_operations: float, num_meetings: int = 1) -> Iterator[None]:
    """All cores for so many multiplications and additions with so many meetings, if they are worth it."""
    if num_operations < WORTH * num_meetings:
        yield
        return
    with torch_threads(num_physical_cores()):
        yield


@contextmanager
def threads_to_factorize(width: int) -> Iterator[None]:
    """For two factorizations, an inverse and a product of matrices [width, width]."""
    with threads_for(4.0 * width**3, 1 + width // COLUMNS):
        yield
