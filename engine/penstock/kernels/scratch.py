"""Scratch memory of one call of cpu.c, which nothing reads afterwards. A thread keeps what calls for a token
or two need: to allocate it for each call would take longer than some of these calls."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

#: Bytes that each thread keeps.
KEPT_BYTES = 512 << 10


class _Kept(threading.local):
    def __init__(self) -> None:
        self.memory = torch.empty(KEPT_BYTES // 4)
        self.address = self.memory.data_ptr()


_kept = _Kept()


def scratch(num_bytes: int) -> tuple[int, Tensor | None]:
    """The address of so many bytes, aligned as floats; and what has to live until the call has ended. The
    next call of scratch() on this thread may return the same bytes."""
    if num_bytes <= KEPT_BYTES:
        return _kept.address, None
    memory = torch.empty(-(-num_bytes // 4))
    return memory.data_ptr(), memory
