"""SharedExperts: experts on a card, and experts that lie in RAM, whose products the processor computes.

Sums of integers are exact, so that a product has the same bits wherever it is computed. The function between
an expert's two products rounds, and a card's exp() is not the processor's: the card computes this function
for all experts. So the activations of an expert in RAM go to the processor twice, before gate and up and
before down. The card adds the experts of a token up, best first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.kernels.experts import (
    Arriving,
    ExpertCalls,
    ExpertKernels,
    ExpertRows,
    settle_all,
)
from penstock.kernels.operands import GatedFunction, Matrix
from penstock.kernels.shared.handover import CrossingProduct, Handover
from penstock.kernels.shared.split_matrix import SplitMatrix

#: A product of the processor: matrix, bias, and the rows that pass through it.
Product = tuple[Matrix, Tensor | None, int]


class CardCalls(ExpertCalls, Protocol):
    """What a card computes of its own experts, and of those in RAM."""

    @property
    def experts(self) -> ExpertKernels: ...


class _Begun(NamedTuple):
    """Experts whose gate and up the processor computes."""

    experts: Sequence[ExpertRows]
    function: GatedFunction
    gate_up: Tensor
    y: Tensor


class SharedExperts(ExpertKernels):
    """ExpertKernels of a card and a processor. Experts in RAM have a SplitMatrix of which nothing is on the
    card. A call for other experts or for none comes after each call for experts in RAM."""

    def __init__(self, first: CardCalls, second: ExpertCalls, handover: Handover) -> None:
        self._first, self._second, self._handover = first, second, handover
        self._handed: Callable[[list[Product]], CrossingProduct | None] = getattr(
            second, "handed_parts", lambda products: None
        )
        self._fetch: Callable[[int, Tensor], None] | None = getattr(first, "fetch", None)
        self._begun: _Begun | None = None
        #: Results of down, which are not in their places yet: (experts, rows of their results, y).
        self._results: list[tuple[Sequence[ExpertRows], Tensor, Tensor]] = []
        #: Experts that the processor has computed.
        self.num_in_ram = 0

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
        in_ram = [each for each in experts if isinstance(each[0].gate_up, SplitMatrix)]
        if self._begun is not None and self._begun.y is not y:
            self._begun = None  # of a step that was given up
        if in_ram:
            rows = x[torch.cat([tokens[first:end] for _, first, end in in_ram])]
            gate_up = self._hand_over(rows, [_gate_up(each) for each in in_ram])
            self._begun = _Begun(in_ram, function, gate_up, y)
            self.num_in_ram += len(in_ram)
        on_card = [each for each in experts if not isinstance(each[0].gate_up, SplitMatrix)]
        if on_card:
            self._first.experts.compute(x, tokens, on_card, function, y)
        if self._begun is not None and not in_ram:
            self._go_on(self._begun)

    def add(self, parts: Tensor, rows: Tensor, scores: Tensor | None, onto: Tensor | None = None) -> Tensor:
        if self._results:
            self._handover.join()
        for experts, results, y in self._results:
            sizes = [end - first for _, first, end in experts]
            for (_, first, end), own in zip(experts, torch.split(results, sizes), strict=True):
                y[first:end] = own
        self._results.clear()
        return self._first.experts.add(parts, rows, scores, onto)

    def _go_on(self, begun: _Begun) -> None:
        """From gate and up to down. What the card was given meanwhile, it computes beside the processor."""
        self._begun = None
        self._handover.join()
        inner = self._first.gated_activation(begun.gate_up, begun.function)
        results = self._hand_over(inner, [_down(each) for each in begun.experts])
        self._results.append((begun.experts, results, begun.y))

    def _hand_over(self, rows: Tensor, products: list[Product]) -> Tensor:
        return self._handover.begin(
            rows,
            products[0][0].out_features,
            _products(self._second.linear, products),
            self._handed(products),
            self._fetch,
        )


def _gate_up(of: ExpertRows) -> Product:
    expert, first, end = of
    return _in_ram(expert.gate_up), expert.gate_up_bias, end - first


def _down(of: ExpertRows) -> Product:
    expert, first, end = of
    return _in_ram(expert.down), expert.down_bias, end - first


def _in_ram(matrix: Matrix) -> Matrix:
    assert isinstance(matrix, SplitMatrix) and matrix.in_ram is not None
    return matrix.in_ram


def _products(
    linear: Callable[[Tensor, Matrix, Tensor | None], Tensor], products: list[Product]
) -> Callable[[Tensor], Tensor]:
    """What computes the rows of these products, which lie one below the other. A handover brings the rows in
    one piece, or in several, in their order."""
    waiting = products[::-1]

    def compute(rows: Tensor) -> Tensor:
        parts, done = list[Tensor](), 0
        while done < len(rows):
            matrix, bias, num_left = waiting.pop()
            num_rows = min(num_left, len(rows) - done)
            if num_rows < num_left:
                waiting.append((matrix, bias, num_left - num_rows))
            parts.append(linear(rows[done : done + num_rows], matrix, bias))
            done += num_rows
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    return compute
