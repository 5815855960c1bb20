"""Scratch memory of one call of cpu.c, which nothing reads afterwards. A thread keeps what calls for a token
or two need: to allocate it for each call would take longer than some of these calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: Bytes that each thread keeps.
KEPT_BYTES = 512 << 10


class _Kept(threading.local):
    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.address = 0
        self.num_bytes = KEPT_BYTES


_kept = _Kept()


def scratch(num_bytes: int) -> tuple[int, Tensor | None]:
    """The address of so many bytes, aligned as floats; and what has to live until the call has ended. The
    next call of scratch() on this thread may return the same bytes."""
    if num_bytes <= _kept.num_bytes:
        if _kept.memory is None:
            _kept.memory = torch.empty(KEPT_BYTES // 4)
            _kept.address = _kept.memory.data_ptr()
        return _kept.address, None
    memory = torch.empty(-(-num_bytes // 4))
    return memory.data_ptr(), memory


@contextmanager
def allocated() -> Iterator[None]:
    """In the `with` block this thread's calls allocate what they need, so that it is seen what a step
    takes."""
    _kept.num_bytes = -1
    try:
        yield
    finally:
        _kept.num_bytes = KEPT_BYTES
