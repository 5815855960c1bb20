"""NativeLowRank: the shares of all adapters of a step in one call of cpu.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.low_rank import BLOCK_RANKS, Share

#: Rows whose inner numbers are in memory at a time, and inputs of one sum (LOW_RANK_ROWS and SHARE_INPUTS of
#: cpu/low_rank.h).
MOST_ROWS, INPUTS = 64, 1024


class NativeLowRank:
    """cpu/low_rank.h, called through ctypes."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def add(self, x: Tensor, y: Tensor, rows: Tensor, shares: Sequence[Share]) -> None:
        numbers: list[int] = []
        parts: list[int] = []
        for index, (share, first, end) in enumerate(shares):
            numbers += (*share.native, first, end)
            for part in share.native_parts:
                parts += (index, *part)
        num_ranks = BLOCK_RANKS * max(share.native[2] for share, _, _ in shares)
        inner = torch.empty(-(-x.shape[1] // INPUTS) * MOST_ROWS * num_ranks)
        self._library.penstock_add_low_rank(
            x.data_ptr(), x.stride(0), x.shape[1], rows.data_ptr(), len(rows),
            _in_memory(numbers), len(shares), _in_memory(parts), len(parts) // 6,
            y.data_ptr(), y.stride(0), inner.data_ptr(), num_ranks,
        )  # fmt: skip


def _in_memory(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)
