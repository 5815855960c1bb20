"""The experts of a layer while a text calibrates a model: which rows each expert gets, and what it makes of
them. A layer is computed twice. The first time, stand-ins of experts hear their rows. Then the experts are
quantized one after the other, each with its rows. The second time, the stand-ins answer what the experts
made. So no more than one expert is in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.weights.layer_weights import ExpertGroup, LayerWeights


class StandIn(NamedTuple):
    """In place of a matrix of an expert."""

    answer: Callable[[Tensor], Tensor]
    out_features: int

    def rows(self, start: int, stop: int) -> StandIn:
        raise TypeError("a stand-in has no rows")

    def look_up(self, row_ids: Tensor) -> Tensor:
        raise TypeError("a stand-in has no rows")

    def map(self, function: Callable[[Tensor], Tensor]) -> StandIn:
        return self

    def dequantize(self) -> Tensor:
        raise TypeError("a stand-in has no weights")


class HeardExperts:
    """A layer's experts by one path: that of quantized weights, or that of exact ones."""

    def __init__(self, hidden_size: int, width: int) -> None:
        """`width` is the number of columns of gate and up together."""
        self._hidden_size, self._width = hidden_size, width
        #: For each expert, its rows of each piece of the text, or what the expert made of them.
        self._rows: dict[int, list[Tensor]] = {}

    def silent(self, numbers: Sequence[int], _: Sequence[int] = ()) -> Iterator[ExpertGroup]:
        """Experts that give zeros."""
        yield from self._group(numbers, lambda number, rows: self._zeros(rows))

    def hearing(self, numbers: Sequence[int], _: Sequence[int] = ()) -> Iterator[ExpertGroup]:
        """Experts that keep their rows. The pieces of the text must come in their order."""
        yield from self._group(numbers, self._keep)

    def answering(self, numbers: Sequence[int], _: Sequence[int] = ()) -> Iterator[ExpertGroup]:
        """Experts that give what answer() has got, piece by piece in the order in which they were heard."""
        yield from self._group(numbers, lambda number, rows: self._rows[number].pop(0))

    def rows(self, number: int) -> Tensor | None:
        """All rows of an expert; None if no token came."""
        found = self._rows.get(number)
        return torch.cat(found) if found else None

    def answer(self, number: int, outputs: Tensor) -> None:
        """What an expert makes of rows()."""
        sizes = [len(piece) for piece in self._rows[number]]
        self._rows[number] = list(torch.split(outputs, sizes))

    def _group(
        self, numbers: Sequence[int], answer: Callable[[int, Tensor], Tensor]
    ) -> Iterator[ExpertGroup]:
        yield [(number, self._expert(number, answer)) for number in numbers]

    def _expert(self, number: int, answer: Callable[[int, Tensor], Tensor]) -> LayerWeights:
        """gate_up hears the rows, and down gives the answer: what lies between is nobody's concern."""
        heard: list[Tensor] = []

        def listen(x: Tensor) -> Tensor:
            heard.append(x)
            return x.new_zeros(len(x), self._width)

        def give(x: Tensor) -> Tensor:
            return answer(number, heard.pop())

        return LayerWeights(
            {"gate_up": StandIn(listen, self._width), "down": StandIn(give, self._hidden_size)}
        )

    def _keep(self, number: int, rows: Tensor) -> Tensor:
        self._rows.setdefault(number, []).append(rows.clone())
        return self._zeros(rows)

    def _zeros(self, rows: Tensor) -> Tensor:
        return rows.new_zeros(len(rows), self._hidden_size)
