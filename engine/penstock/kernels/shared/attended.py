"""Attended: splits of keys that lie in the host's memory beside a card, and the processor's part of a step's
attention, which has the bits of the card's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.operands import AttentionSpec, LayerKV, RamSplits
from penstock.kernels.shared.crossing import Crossing, open_crossing

#: As in cpu/attended.h.
SPLIT_KEYS, ATTENDED_DIM = 256, 256


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
    """A layer's attention to the splits in RAM, for whoever knows no Python. A CrossingProduct."""

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
