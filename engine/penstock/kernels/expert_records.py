"""What cpu/experts.h takes of a matrix, in C's form, and the scratch memory of products."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

_P, _N, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
#: Bytes for C's own values of an expert, and how the parts of the scratch memory are aligned (experts.h).
_PRODUCT_BYTES, _ALIGNED = 512, 64
#: Bytes that penstock_token_experts() takes for an expert beside its result and what other calls take.
_TOKEN_BYTES = 64


class NumbersRecord(ctypes.Structure):
    """The group_numbers of linear.h."""

    _fields_ = (
        ("scale", _P), ("minimum", _P), ("sub_scale", _P), ("sub_minimum", _P), ("block_groups", _N),
        ("dtype", _I), ("bits", _I),
    )  # fmt: skip


class MatrixRecord(ctypes.Structure):
    """The expert_matrix of experts.h."""

    _fields_ = (
        ("qweight", _P), ("table", ctypes.c_char_p), ("numbers", NumbersRecord), ("num_groups", _N),
        ("in_features", _N), ("out_features", _N), ("lower", _P), ("lower_bytes", _N),
    )  # fmt: skip


class WeightsRecord(ctypes.Structure):
    """The expert_weights of experts.h."""

    _fields_ = (("gate_up", _P), ("down", _P), ("gate_up_bias", _P), ("down_bias", _P))


def token_bytes(in_features: int, num_groups: int) -> int:
    """Bytes of a row of activations as integers, with their sums and scales. The integers are padded to a
    multiple of 256 at most (codes of 3 bits), and 64 more: row_padding() of linear/products.h."""
    return 2 * ((in_features + 255) // 256 * 256 + 64) + 8 * num_groups + 4


def padded_rows(num_rows: int) -> int:
    """Rows for which activations need room: several rows lie in tiles of eight."""
    return num_rows if num_rows <= 1 else (num_rows + 7) // 8 * 8


class ExpertRecord(NamedTuple):
    """What experts.h takes of an expert, but for its rows. The other records live as long as this one."""

    #: Where the expert's WeightsRecord lies.
    address: int
    #: Bytes of scratch memory for a row: activations, and the results of gate_up before and after the
    #: activation function.
    row_bytes: int
    records: tuple[WeightsRecord, MatrixRecord, MatrixRecord]

    @classmethod
    def of(
        cls,
        gate_up: MatrixRecord | None,
        down: MatrixRecord | None,
        gate_up_bias: int | None,
        down_bias: int | None,
    ) -> ExpertRecord | None:
        """None where a matrix has no record."""
        if gate_up is None or down is None:
            return None
        activations = (token_bytes(each.in_features, each.num_groups) for each in (gate_up, down))
        matrices = ctypes.addressof(gate_up), ctypes.addressof(down)
        weights = WeightsRecord(*matrices, gate_up_bias, down_bias)
        row_bytes = 12 * down.in_features + max(activations)
        return cls(ctypes.addressof(weights), row_bytes, (weights, gate_up, down))


def scratch_bytes(num_experts: int, num_padded: int, row_bytes: int) -> int:
    """Bytes of scratch memory for experts that have so many padded rows together."""
    return num_experts * (_PRODUCT_BYTES + _ALIGNED) + 4 * _ALIGNED + num_padded * row_bytes


def token_scratch_bytes(num_experts: int, row_bytes: int, width: int) -> int:
    """The same for penstock_token_experts(), which keeps the experts' results of this width as well."""
    return scratch_bytes(num_experts, num_experts, row_bytes) + num_experts * (_TOKEN_BYTES + 4 * width)
