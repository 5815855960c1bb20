"""DrawnRouters: kernels whose routers choose by chance, with a given popularity of experts. The weights of a
benchmark are random, and what their routers would choose says nothing about a trained model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.kernels import ForwardingKernels, Kernels, RouterFunction

#: Rows of scores that are drawn at a time.
DRAWN_AHEAD = 1024


class DrawnRouters(ForwardingKernels):
    """A token's logits are the logarithms of the experts' weights, plus noise of Gumbel's distribution. The
    largest of them are then drawn one after the other, in proportion to the weights of those that are left.
    Expert 0 of each layer has the first weight. The routers' own products are computed, too, for their
    time."""

    def __init__(self, kernels: Kernels, weights: tuple[float, ...], seed: int = 0) -> None:
        super().__init__(kernels)
        self._logits = torch.tensor(weights).log()
        self._generator = torch.Generator().manual_seed(seed)
        #: Scores that are drawn ahead, of each function: one by one, they would take longer than a router.
        self._drawn: dict[RouterFunction, Iterator[Tensor]] = {}

    def router_scores(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, function: RouterFunction
    ) -> Tensor:
        own = super().router_scores(x, weight, bias, function)
        if len(own) > 1:
            return self._draw(len(own), function).to(own.device)
        drawn = self._drawn.setdefault(function, iter(()))
        row = next(drawn, None)
        if row is None:
            self._drawn[function] = drawn = iter(torch.split(self._draw(DRAWN_AHEAD, function), 1))
            row = next(drawn)
        return row.to(own.device)

    def _draw(self, num_rows: int, function: RouterFunction) -> Tensor:
        noise = -torch.empty(num_rows, len(self._logits)).exponential_(generator=self._generator).log()
        logits = self._logits + noise
        if function == "softmax":
            return logits.softmax(-1)
        return torch.sigmoid(logits) if function == "sigmoid" else logits
