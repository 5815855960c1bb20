"""HandedProduct and HandedParts: products of the processor that a card hands over. Compiled code computes
them alone: a thread that had to wait for the interpreter's lock would keep the card waiting."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.expert_records import MatrixRecord, padded_rows, scratch_bytes, token_bytes
from penstock.kernels.operands import Matrix, address
from penstock.kernels.shared.crossing import Crossing, open_crossing

#: A matrix, the address of its bias, and its number of rows.
Part = tuple[MatrixRecord, int | None, int]
#: void (*)(void *), which a driver calls.
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
#: Numbers of rows of which a matrix keeps what a crossing takes: prompts' chunks may have any number.
MAX_NUMBERS = 32


class HandedRecord(ctypes.Structure):
    """The handed_product of handed_product.h."""

    _fields_ = (
        ("matrix", ctypes.c_void_p), ("x", ctypes.c_void_p), ("num_tokens", ctypes.c_int64),
        ("activation_bits", ctypes.c_int64), ("y", ctypes.c_void_p), ("scratch", ctypes.c_void_p),
    )  # fmt: skip


class HandedProduct:
    """y = x W^T, for callers in C: whenever `function` is called with the address of a record, or
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
        matrix, num_rows = self._matrix, x.shape[0]
        # Kept with the record, which stays where it is: each step has the same products.
        known: dict[int, _Numbers] = matrix.__dict__.setdefault("numbers_of_rows", {})
        numbers = known.get(num_rows)
        if numbers is None:
            if len(known) >= MAX_NUMBERS:  # the crossing holds those of products that are not computed
                known.clear()
            numbers = known[num_rows] = _Numbers.of([(matrix, None, num_rows)])
        return crossing.begin(
            numbers.parts, numbers.sizes, self._bits, numbers.scratch_bytes, x, (matrix, self._weight)
        )

    def _scratch_bytes(self, num_tokens: int) -> int:
        matrix = self._matrix
        return padded_rows(num_tokens) * token_bytes(matrix.in_features, matrix.num_groups)


class HandedParts:
    """Products of several matrices of one shape, whose rows lie one below the other. They have no function
    for a driver's thread, which would be called with a piece of the rows and not know whose rows they are."""

    def __init__(
        self, library: Any, activation_bits: int, parts: Sequence[Part], products: Sequence[object]
    ) -> None:
        """`products` have the memory to which the parts point."""
        self._library, self._bits, self._parts, self._products = library, activation_bits, parts, products

    @classmethod
    def of(
        cls, library: Any, activation_bits: int, products: Sequence[tuple[Matrix, Tensor | None, int]]
    ) -> HandedParts | None:
        """Of matrix, bias and number of rows. None where a matrix has no record."""
        parts = list[Part]()
        for weight, bias, num_rows in products:
            matrix: MatrixRecord | None = getattr(weight, "record", None)
            if matrix is None:
                return None
            parts.append((matrix, address(bias), num_rows))
        return cls(library, activation_bits, parts, products)

    def open_crossing(self, driver: Any, memory: Tensor, device: torch.device) -> Crossing | None:
        """open_crossing() for these products, and others of the same kernels."""
        return open_crossing(self._library, driver, memory, device)

    def cross(self, crossing: Crossing, x: Tensor) -> bool:
        """Crossing.begin() of these products. x has all their rows."""
        numbers = _Numbers.of(self._parts)
        return crossing.begin(
            numbers.parts, numbers.sizes, self._bits, numbers.scratch_bytes, x, self._products
        )


class _Numbers(NamedTuple):
    """What Crossing.begin() takes of parts."""

    parts: array[int]
    sizes: tuple[int, int]
    scratch_bytes: int

    @classmethod
    def of(cls, parts: Sequence[Part]) -> _Numbers:
        numbers, num_padded, row_bytes = array("q"), 0, 0
        for matrix, bias, num_rows in parts:
            numbers.extend((ctypes.addressof(matrix), bias or 0, num_rows))
            num_padded += padded_rows(num_rows)
            row_bytes = max(row_bytes, token_bytes(matrix.in_features, matrix.num_groups))
        first, _, _ = parts[0]
        sizes = first.in_features, first.out_features
        return cls(numbers, sizes, scratch_bytes(len(parts), num_padded, row_bytes))
