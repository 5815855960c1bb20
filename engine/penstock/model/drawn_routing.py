"""DrawnRouters: kernels whose routers choose by chance, with a given popularity of experts. The weights of a
benchmark are random, and what their routers would choose says nothing about a trained model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.kernels import ForwardingKernels, Kernels, RouterFunction

#: The share of scores that a guess knows, so that it finds about 80% of a token's experts by the usual
#: popularity. Others measured 70 to 89% in trained models.
SHARE_GUESSED = 0.8
#: Rows of scores that are drawn at a time.
DRAWN_AHEAD = 1024


class DrawnRouters(ForwardingKernels):
    """A token's logits are the logarithms of the experts' weights, plus noise of Gumbel's distribution. The
    largest of them are then drawn one after the other, in proportion to the weights of those that are left.
    Expert 0 of each layer has the first weight. The routers' own products are computed, too, for their
    time.

    A layer may guess what the next layer will choose: then the next layer's router is asked with an x that
    this layer's router has got. The guess knows the share `share_guessed` of the scores; the others are drawn
    anew."""

    def __init__(
        self,
        kernels: Kernels,
        weights: tuple[float, ...],
        seed: int = 0,
        share_guessed: float = SHARE_GUESSED,
    ) -> None:
        super().__init__(kernels)
        self.sublayers = kernels.sublayers
        self._logits = torch.tensor(weights).log()
        self._generator = torch.Generator().manual_seed(seed)
        self._share_guessed = share_guessed
        #: Scores that are drawn ahead, of each function, with the guesses for them: one by one, they would
        #: take longer than a router.
        self._drawn: dict[RouterFunction, Iterator[tuple[Tensor, Tensor]]] = {}
        #: What the last router got, and the router's address; scores of routers that were guessed.
        self._asked: tuple[Tensor, int] | None = None
        self._guessed: dict[int, Tensor] = {}

    def router_scores(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, function: RouterFunction
    ) -> Tensor:
        own = super().router_scores(x, weight, bias, function)
        router = weight.data_ptr()
        if len(own) > 1:
            return self._draw(len(own), function).to(own.device)
        if self._asked is not None and x is self._asked[0] and router != self._asked[1]:
            self._guessed[router], guess = self._next(function)
            return guess.to(own.device)
        self._asked = x, router
        guessed = self._guessed.pop(router, None)
        return (self._next(function)[0] if guessed is None else guessed).to(own.device)

    def _next(self, function: RouterFunction) -> tuple[Tensor, Tensor]:
        """The scores of one token, and a guess."""
        found = next(self._drawn.setdefault(function, iter(())), None)
        if found is None:
            rows, others = self._draw(DRAWN_AHEAD, function), self._draw(DRAWN_AHEAD, function)
            is_right = torch.rand(rows.shape, generator=self._generator) < self._share_guessed
            guesses = torch.where(is_right, rows, others)
            self._drawn[function] = zip(torch.split(rows, 1), torch.split(guesses, 1), strict=True)
            found = next(self._drawn[function])
        return found

    def _draw(self, num_rows: int, function: RouterFunction) -> Tensor:
        noise = -torch.empty(num_rows, len(self._logits)).exponential_(generator=self._generator).log()
        logits = self._logits + noise
        if function == "softmax":
            return logits.softmax(-1)
        return torch.sigmoid(logits) if function == "sigmoid" else logits
