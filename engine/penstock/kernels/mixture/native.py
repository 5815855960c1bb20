"""NativeExperts: experts of a layer in one call of cpu.c, whose threads share the work of all experts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.expert_records import padded_rows, scratch_bytes, token_scratch_bytes
from penstock.kernels.experts import (
    Arriving,
    ExpertCalls,
    ExpertKernels,
    ExpertRows,
    GatedExpert,
    PlainExperts,
    settle_all,
)
from penstock.kernels.operands import GatedFunction, address, gated_code
from penstock.kernels.scratch import scratch

#: Padded rows of one call if several experts have them, so that the scratch memory stays small.
MOST_ROWS = 256
#: Numbers of an expert as experts.h reads it: where its weights are, its first row and the end of its rows.
_RECORD_NUMBERS = 3


class NativeExperts(ExpertKernels):
    """Experts whose matrices have records are computed together, other experts one by one."""

    def __init__(self, library: Any, activation_bits: int, kernels: ExpertCalls) -> None:
        self._library = library
        self._activation_bits = activation_bits
        self._plain = PlainExperts(kernels)

    def compute(
        self,
        x: Tensor,
        tokens: Tensor,
        experts: Sequence[ExpertRows],
        function: GatedFunction,
        y: Tensor,
        arriving: Arriving | None = None,
    ) -> None:
        calls = _calls(experts)
        if calls is None:
            self._plain.compute(x, tokens, experts, function, y, arriving)
            return
        if len(calls) > 1:
            settle_all(arriving)
            arriving = None
        for numbers, num_padded, row_bytes in calls:
            number, records = len(numbers) // _RECORD_NUMBERS, array("q", numbers)
            room, _held = scratch(scratch_bytes(number, num_padded, row_bytes))
            given = x.data_ptr(), x.stride(0), tokens.data_ptr()
            how = *gated_code(function), self._activation_bits, y.data_ptr(), room
            at, first, num_there = records.buffer_info()[0], 0, number
            if arriving is None:
                self._library.penstock_gated_experts(*given, at, number, *how, number, None, None, None)
                continue
            num_there -= len(arriving)
            while first < number:
                waiting = array("i", arriving.tickets()[max(0, first - num_there) :])
                first += self._library.penstock_gated_experts(
                    *given, at + first * _RECORD_NUMBERS * records.itemsize, number - first, *how,
                    max(0, num_there - first), waiting.buffer_info()[0], arriving.wait, arriving.reads,
                )  # fmt: skip
                if first < number:
                    arriving.settle(first - num_there)

    def add(self, parts: Tensor, rows: Tensor, scores: Tensor | None, onto: Tensor | None = None) -> Tensor:
        (num_tokens, num_ranks), width = rows.shape, parts.shape[1]
        y = torch.empty(num_tokens, width)
        self._library.penstock_weighted_sum(
            parts.data_ptr(), rows.data_ptr(), address(scores), address(onto), num_tokens, num_ranks, width,
            y.data_ptr(),
        )  # fmt: skip
        return y

    def blend_token(
        self,
        x: Tensor,
        experts: Sequence[GatedExpert],
        function: GatedFunction,
        scores: Tensor,
        onto: Tensor | None = None,
    ) -> Tensor:
        addresses, row_bytes, num_experts = array("q"), 0, len(experts)
        for expert in experts:
            record = expert.native
            if record is None:
                return super().blend_token(x, experts, function, scores, onto)
            addresses.append(record.address)
            if record.row_bytes > row_bytes:
                row_bytes = record.row_bytes
        width = experts[0].down.out_features
        y = torch.empty(1, width)
        room, _held = scratch(token_scratch_bytes(num_experts, row_bytes, width))
        self._library.penstock_token_experts(
            x.data_ptr(), addresses.buffer_info()[0], num_experts, *gated_code(function),
            self._activation_bits, scores.data_ptr(), address(onto), y.data_ptr(), room,
        )  # fmt: skip
        return y


class UncomputedExperts(NativeExperts):
    """With a library whose functions do nothing."""

    def compute(
        self,
        x: Tensor,
        tokens: Tensor,
        experts: Sequence[ExpertRows],
        function: GatedFunction,
        y: Tensor,
        arriving: Arriving | None = None,
    ) -> None:
        settle_all(arriving)
        super().compute(x, tokens, experts, function, y)


def _calls(experts: Sequence[ExpertRows]) -> list[tuple[list[int], int, int]] | None:
    """The calls that compute these experts: for each, its experts as experts.h reads them, number by number,
    their padded rows, and the bytes of scratch memory for a row. None: an expert has no record."""
    calls: list[tuple[list[int], int, int]] = []
    numbers: list[int] = []
    num_padded = row_bytes = 0
    for expert, first, end in experts:
        record = expert.native
        if record is None:
            return None
        own = 1 if end - first == 1 else padded_rows(end - first)
        if num_padded + own > MOST_ROWS and numbers:
            calls.append((numbers, num_padded, row_bytes))
            numbers, num_padded, row_bytes = [], 0, 0
        numbers += (record.address, first, end)
        num_padded += own
        if record.row_bytes > row_bytes:
            row_bytes = record.row_bytes
    calls.append((numbers, num_padded, row_bytes))
    return calls
