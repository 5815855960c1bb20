"""ExpertKernels: the arithmetic of a mixture of experts, and its plain form, expert by expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.expert_records import ExpertRecord
from penstock.kernels.operands import GatedFunction, Matrix, address


@dataclass(frozen=True)
class GatedExpert:
    """The weights of an expert that computes down(f(gate x) * up x)."""

    gate_up: Matrix  # the rows of gate come first, but for ClampedGate
    down: Matrix
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @cached_property
    def native(self) -> ExpertRecord | None:
        """What compiled kernels of the host take of the expert; None: they don't know its matrices."""
        records = getattr(self.gate_up, "record", None), getattr(self.down, "record", None)
        return ExpertRecord.of(*records, address(self.gate_up_bias), address(self.down_bias))


#: An expert, its first row and the end of its rows.
ExpertRows = tuple[GatedExpert, int, int]


class Arriving(Protocol):
    """The reads of the last experts of a call, whose weights arrive one after the other in their order."""

    #: Addresses for C: what tells of the end of a read (the wait_fn of experts.h), and its first argument.
    wait: int
    reads: int

    def __len__(self) -> int: ...

    def tickets(self) -> list[int]:
        """The number of each read for `wait`; -1: it has ended. Raises what reading raised."""

    def settle(self, index: int) -> None:
        """Wait for one of the reads. Raises what reading raised."""


def settle_all(arriving: Arriving | None) -> None:
    """Wait for all of these reads. Raises what reading raised."""
    for index in range(len(arriving) if arriving is not None else 0):
        assert arriving is not None
        arriving.settle(index)


class ExpertKernels(Protocol):
    """Part of Kernels."""

    def compute(
        self,
        x: Tensor,
        tokens: Tensor,
        experts: Sequence[ExpertRows],
        function: GatedFunction,
        y: Tensor,
        arriving: Arriving | None = None,
    ) -> None:
        """Each expert's results, written to its rows of y [num_rows, out_features]. Row r of an expert is row
        tokens[r] of x [num_tokens, in_features]; `tokens` is int64 [num_rows]. A result has the bits of
        linear() and gated_activation(), in any company. The weights of the last experts, as many as
        `arriving` has, are there when their reads have ended. Raises what reading raised."""

    def add(self, parts: Tensor, rows: Tensor, scores: Tensor | None, onto: Tensor | None = None) -> Tensor:
        """The sum over r of parts[rows[t, r]] * scores[t, r], for each token t: parts [num_rows, width], rows
        int64 and scores float32 [num_tokens, num_ranks] -> [num_tokens, width]. Ranks are added in their
        order, and their sum to `onto` [num_tokens, width]; each product and each sum rounds. Without scores,
        the parts themselves are added."""

    def blend_token(
        self,
        x: Tensor,
        experts: Sequence[GatedExpert],
        function: GatedFunction,
        scores: Tensor,
        onto: Tensor | None = None,
    ) -> Tensor:
        """add() of what compute() gives for one token, x [1, in_features], and its experts, best first, with
        their scores [1, num_experts]."""
        rows = torch.arange(len(experts), device=x.device)
        parts = x.new_empty(len(experts), experts[0].down.out_features)
        given = [(expert, row, row + 1) for row, expert in enumerate(experts)]
        self.compute(x, torch.zeros_like(rows), given, function, parts)
        return self.add(parts, rows[None], scores, onto)


class ExpertCalls(Protocol):
    """The calls of which an expert consists."""

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor: ...

    def gated_activation(self, gate_up: Tensor, function: GatedFunction) -> Tensor: ...


class PlainExperts(ExpertKernels):
    """Experts one after the other, by the calls of other kernels. Other forms are tested against this one."""

    def __init__(self, kernels: ExpertCalls) -> None:
        self._kernels = kernels

    def compute(
        self,
        x: Tensor,
        tokens: Tensor,
        experts: Sequence[ExpertRows],
        function: GatedFunction,
        y: Tensor,
        arriving: Arriving | None = None,
    ) -> None:
        kernels, num_there = self._kernels, len(experts) - (len(arriving) if arriving is not None else 0)
        for index, (expert, first, end) in enumerate(experts):
            if arriving is not None and index >= num_there:
                arriving.settle(index - num_there)
            rows = kernels.linear(x[tokens[first:end]], expert.gate_up, expert.gate_up_bias)
            inner = kernels.gated_activation(rows, function)
            y[first:end] = kernels.linear(inner, expert.down, expert.down_bias)

    def add(self, parts: Tensor, rows: Tensor, scores: Tensor | None, onto: Tensor | None = None) -> Tensor:
        ranked = parts[rows]
        if scores is not None:
            ranked *= scores[..., None]
        total, *others = ranked.unbind(1)
        for part in others:
            total += part
        return total if onto is None else onto + total
