"""HandedProduct: a product of the processor that a thread of a card's driver calls. Compiled code computes it
alone: a thread that had to wait for the interpreter's lock would keep the card waiting."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.expert_records import MatrixRecord, padded_rows, token_bytes
from penstock.kernels.shared.crossing import Crossing, open_crossing

#: void (*)(void *), which a driver calls.
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class HandedRecord(ctypes.Structure):
    """The handed_product of handed_product.h."""

    _fields_ = (
        ("matrix", ctypes.c_void_p), ("x", ctypes.c_void_p), ("num_tokens", ctypes.c_int64),
        ("activation_bits", ctypes.c_int64), ("y", ctypes.c_void_p), ("scratch", ctypes.c_void_p),
    )  # fmt: skip


class HandedProduct:
    """y = x W^T, for whoever knows no Python: whenever `function` is called with the address of a record, or
    through a crossing."""

    def __init__(self, library: Any, activation_bits: int, matrix: MatrixRecord, weight: object) -> None:
        """`weight` has the memory to which `matrix` points."""
        self.out_features: int = matrix.out_features
        self._library, self._bits, self._matrix, self._weight = library, activation_bits, matrix, weight

    @property
    def function(self) -> Any:
        address = ctypes.cast(self._library.penstock_handed_product, ctypes.c_void_p).value
        assert address is not None
        return HOST_FUNCTION(address)

    def record(self, x: Tensor, y: Tensor) -> HandedRecord:
        """What `function` takes for x, float32 [num_tokens, in_features], and y, float32 [num_tokens,
        out_features], both contiguous. The caller keeps the record, x and y until the call is over."""
        matrix, num_tokens = self._matrix, x.shape[0]
        scratch = torch.empty(self._scratch_bytes(num_tokens) // 4)
        record = HandedRecord(
            ctypes.addressof(matrix), x.data_ptr(), num_tokens, self._bits, y.data_ptr(), scratch.data_ptr()
        )
        record.kept = matrix, self._weight, scratch
        return record

    def open_crossing(self, driver: Any, memory: Tensor, device: torch.device) -> Crossing | None:
        """open_crossing() for this product, and others of the same kernels."""
        return open_crossing(self._library, driver, memory, device)

    def cross(self, crossing: Crossing, x: Tensor) -> bool:
        """Crossing.begin() of this product."""
        return crossing.begin(self._matrix, self._weight, self._bits, self._scratch_bytes(x.shape[0]), x)

    def _scratch_bytes(self, num_tokens: int) -> int:
        matrix = self._matrix
        return padded_rows(num_tokens) * token_bytes(matrix.in_features, matrix.num_groups)
