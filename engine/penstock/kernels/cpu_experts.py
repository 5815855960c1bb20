"""NativeExperts: experts of a layer in one call of cpu.c, whose threads share the work of all experts."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from penstock.kernels.expert_records import ExpertRecord, padded_rows, scratch_bytes
from penstock.kernels.experts import (
    Arriving,
    ExpertCalls,
    ExpertRows,
    PlainExperts,
    Routed,
    settle_all,
)
from penstock.kernels.operands import GatedFunction, address, gated_code

#: Padded rows of one call if several experts have them, so that the scratch memory stays small.
MOST_ROWS = 256
#: Bytes of an expert as experts.h reads it.
_RECORD_BYTES = 48
#: An expert's record, its first row and the end of its rows.
_Given = tuple[ExpertRecord, int, int]


class NativeExperts:
    """Experts whose matrices have records are computed together, other experts one by one."""

    def __init__(self, library: Any, activation_bits: int, kernels: ExpertCalls) -> None:
        self._library = library
        self._activation_bits = activation_bits
        self._plain = PlainExperts(kernels)

    def choose(
        self, scores: Tensor, ranked: Tensor, num_chosen: int, least_sum: float | None, scaling: float
    ) -> Routed:
        num_tokens, num_experts = ranked.shape
        scores, ranked = scores.contiguous(), ranked.contiguous()
        experts = torch.empty(num_tokens, num_chosen, dtype=torch.int64)
        chosen = torch.empty(num_tokens, num_chosen)
        self._library.penstock_choose_experts(
            scores.data_ptr(), ranked.data_ptr(), num_tokens, num_experts, num_chosen, least_sum is not None,
            least_sum or 0.0, scaling, experts.data_ptr(), chosen.data_ptr(),
        )  # fmt: skip
        return Routed(experts, chosen)

    def compute(
        self,
        x: Tensor,
        tokens: Tensor,
        experts: Sequence[ExpertRows],
        function: GatedFunction,
        y: Tensor,
        arriving: Arriving | None = None,
    ) -> None:
        given = [(expert.native, first, end) for expert, first, end in experts]
        if any(record is None for record, _, _ in given):
            self._plain.compute(x, tokens, experts, function, y, arriving)
            return
        calls = list(_in_calls(cast(list[_Given], given)))
        if arriving is not None and len(calls) == 1:
            self._compute_arriving(x, tokens, *calls[0], function, y, arriving)
            return
        settle_all(arriving)
        for some, num_padded in calls:
            scratch = torch.empty(
                scratch_bytes(len(some), num_padded, max(record.row_bytes for record, _, _ in some)) // 4
            )
            self._library.penstock_gated_experts(
                x.data_ptr(), x.stride(0), tokens.data_ptr(), _in_memory(some), len(some),
                *gated_code(function), self._activation_bits, y.data_ptr(), scratch.data_ptr(),
                len(some), None, None, None,
            )  # fmt: skip

    def _compute_arriving(
        self,
        x: Tensor,
        tokens: Tensor,
        experts: Sequence[_Given],
        num_padded: int,
        function: GatedFunction,
        y: Tensor,
        arriving: Arriving,
    ) -> None:
        """compute() of experts that one call takes."""
        row_bytes = max(record.row_bytes for record, _, _ in experts)
        scratch = torch.empty(scratch_bytes(len(experts), num_padded, row_bytes) // 4)
        num_there, records, code = len(experts) - len(arriving), _in_memory(experts), gated_code(function)
        tickets, first = arriving.tickets(), 0
        while first < len(experts):
            begun = max(0, first - num_there)
            first += self._library.penstock_gated_experts(
                x.data_ptr(), x.stride(0), tokens.data_ptr(), ctypes.byref(records, first * _RECORD_BYTES),
                len(experts) - first, *code, self._activation_bits, y.data_ptr(), scratch.data_ptr(),
                max(0, num_there - first), (ctypes.c_int32 * len(tickets))(*tickets[begun:]), arriving.wait,
                arriving.reads,
            )  # fmt: skip
            if first < len(experts):
                arriving.settle(first - num_there)
                tickets = arriving.tickets()

    def add(self, parts: Tensor, rows: Tensor, scores: Tensor | None) -> Tensor:
        (num_tokens, num_ranks), width = rows.shape, parts.shape[1]
        y = torch.empty(num_tokens, width)
        self._library.penstock_weighted_sum(
            parts.data_ptr(), rows.data_ptr(), address(scores), num_tokens, num_ranks, width, y.data_ptr()
        )
        return y


class UncomputedExperts(NativeExperts):
    """With a library whose functions do nothing. Experts are chosen all the same, since their numbers decide
    what is asked for."""

    def choose(
        self, scores: Tensor, ranked: Tensor, num_chosen: int, least_sum: float | None, scaling: float
    ) -> Routed:
        return self._plain.choose(scores, ranked, num_chosen, least_sum, scaling)

    def _compute_arriving(self, *operands: Any) -> None:
        settle_all(cast(Arriving, operands[-1]))


def _in_calls(experts: Sequence[_Given]) -> Iterator[tuple[Sequence[_Given], int]]:
    """Experts that one call computes, and their padded rows."""
    some: list[_Given] = []
    num_padded = 0
    for record, first, end in experts:
        own = padded_rows(end - first)
        if some and num_padded + own > MOST_ROWS:
            yield some, num_padded
            some, num_padded = [], 0
        some.append((record, first, end))
        num_padded += own
    if some:
        yield some, num_padded


def _in_memory(experts: Sequence[_Given]) -> ctypes.Array[ctypes.c_int64]:
    """Experts side by side, as experts.h reads them."""
    numbers: list[int] = []
    for record, first, end in experts:
        numbers += record.numbers
        numbers += (first, end)
    return (ctypes.c_int64 * len(numbers))(*numbers)
