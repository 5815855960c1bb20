"""Attended: splits of keys that lie in the host's memory beside a card, and the processor's part of a step's
attention, which has the bits of the card's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.operands import AttentionSpec, LayerKV, RamKV, RamSplits
from penstock.kernels.shared.crossing import Crossing, open_crossing
from penstock.kernels.shared.handover import Handover


class AttendedRecord(ctypes.Structure):
    """The `attended` of attended.h."""

    _fields_ = (
        ("k_cache", ctypes.c_void_p), ("v_cache", ctypes.c_void_p),
        ("form", ctypes.c_int64), ("num_heads", ctypes.c_int64), ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64), ("block_size", ctypes.c_int64), ("window", ctypes.c_int64),
        ("chunk", ctypes.c_int64), ("items", ctypes.c_void_p), ("blocks", ctypes.c_void_p),
        ("num_items", ctypes.c_int64), ("scale", ctypes.c_float), ("softcap", ctypes.c_float),
    )  # fmt: skip


class HandedAttention:
    """A layer's attention to the splits in RAM, for callers in C. A CrossingProduct."""

    def __init__(self, library: Any, kv: LayerKV, splits: RamSplits, spec: AttentionSpec) -> None:
        """`kv` has the layer's blocks in RAM, which the splits count."""
        code, keys, values = kv.plain
        assert values is not None
        num_kv_heads, head_dim, block_size = kv.sizes
        self._library = library
        self._kept = kv, splits
        self._num_places, self._row = splits.num_places, spec.num_heads * (head_dim + 2)
        self._record = AttendedRecord(
            keys.data_ptr(), values.data_ptr(), code, spec.num_heads, num_kv_heads, head_dim, block_size,
            spec.window, spec.chunk, splits.items.data_ptr(), splits.blocks.data_ptr(), len(splits.items),
            spec.scale, spec.softcap,
        )  # fmt: skip

    def compute(self, q: Tensor) -> Tensor:
        """Partial results [num_places, num_heads * (head_dim + 2)] of q, float32 [num_tokens, num_heads *
        head_dim], contiguous on the host."""
        y = q.new_empty(self._num_places, self._row)
        self._library.penstock_attend(ctypes.byref(self._record), q.data_ptr(), y.data_ptr())
        return y

    def open_crossing(self, driver: Any, memory: Tensor, device: torch.device) -> Crossing | None:
        """open_crossing() for this attention, and products of the same kernels."""
        return open_crossing(self._library, driver, memory, device)

    def cross(self, crossing: Crossing, q: Tensor) -> bool:
        """Crossing.attend() with q on the card."""
        num_results = self._num_places * self._row
        return crossing.attend(ctypes.addressof(self._record), num_results, q, (self._record, self._kept))


class AttentionBeside:
    """The processor's part of a card's attention, handed over."""

    def __init__(
        self,
        attended: Callable[[RamKV, AttentionSpec], HandedAttention],
        handover: Handover,
        fetch: Callable[[int, Tensor], None],
    ) -> None:
        """`attended` is NativeKernels.attended(), `fetch` the card's."""
        self._attended, self._handover, self._fetch = attended, handover, fetch
        #: Layers' steps in which the processor has attended.
        self.num_handed = 0

    def begin(self, q: Tensor, in_ram: RamKV, spec: AttentionSpec) -> Tensor:
        """Have the processor attend with q [num_tokens, num_heads, head_dim] on the card. After join(), the
        result has the items' partial results, float32 [num_items, num_heads, head_dim + 2]."""
        self.num_handed += 1
        num_tokens, num_heads, head_dim = q.shape
        handed, row = self._attended(in_ram, spec), num_heads * (head_dim + 2)
        num_places = in_ram.splits.num_places

        def compute(x: Tensor) -> Tensor:
            assert len(x) == num_tokens, "items count rows of the whole step, which crosses in one piece"
            return handed.compute(x.contiguous()).view(num_tokens, -1)

        y = self._handover.begin(
            q.reshape(num_tokens, -1),
            num_places // num_tokens * row,
            compute,
            handed,
            self._fetch,
        )
        return y.view(num_places, num_heads, head_dim + 2)[: len(in_ram.splits.items)]

    def join(self) -> None:
        self._handover.join()
