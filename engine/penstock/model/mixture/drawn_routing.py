"""DrawnRouters: kernels whose routers choose by chance, with a given popularity of experts. The weights of a
benchmark are random, and what their routers would choose says nothing about a trained model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.kernels import (
    BatchLayout,
    ForwardingKernels,
    GatedExpert,
    GatedFunction,
    Kernels,
    LayerKV,
    Routed,
    Router,
    Routing,
)
from penstock.kernels.mixture.routing import choose
from penstock.kernels.operands import RouterFunction
from penstock.kernels.sublayers.attention_sublayer import AttentionSublayer, Turns
from penstock.kernels.sublayers.mixture_layer import GivenChoice, MixtureLayer, MixtureSweep
from penstock.kernels.sublayers.protocol import Sublayers
from penstock.kernels.sublayers.whole_layer import WholeLayer

if TYPE_CHECKING:
    from penstock.kernels.sublayers.mixer import Mixer

#: The share of scores that a guess knows, so that it finds about 80% of a token's experts by the usual
#: popularity. Others measured 70 to 89% in trained models.
SHARE_GUESSED = 0.8
#: Choices that are drawn at the beginning.
NUM_DRAWN = 8192


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
        if kernels.sublayers is not None:
            self.sublayers = _DrawnSublayers(kernels.sublayers, self)
        self._logits = torch.tensor(weights).log()
        self._generator = torch.Generator().manual_seed(seed)
        self._share_guessed = share_guessed
        #: Choices with the guesses of them, of which one is taken by chance each time: drawn one by one, they
        #: would take longer than a router.
        self._drawn: dict[Routing, list[tuple[Routed, Routed]]] = {}
        self._random = random.Random(seed)
        #: What the last router got, and the router's address; choices of routers that were guessed.
        self._asked: tuple[Tensor, int] | None = None
        self._guessed: dict[int, Routed] = {}

    def route(self, x: Tensor, router: Router, routing: Routing) -> Routed:
        own, address = self._kernels.route(x, router, routing), router.weight.data_ptr()
        if x.shape[0] > 1:
            return _chosen(self._draw(x.shape[0]), routing, own.experts.device)
        if self._asked is not None and x is self._asked[0] and address != self._asked[1]:
            self._guessed[address], guess = self._next(routing, own.experts.device)
            return guess
        self._asked = x, address
        guessed = self._guessed.pop(address, None)
        return self._next(routing, own.experts.device)[0] if guessed is None else guessed

    def router_scores(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, function: RouterFunction
    ) -> Tensor:
        """Choices that kernels don't have (sparse_mixer) take the router's logits."""
        own = self._kernels.router_scores(x, weight, bias, function)
        if function != "none" or weight.shape[0] != len(self._logits):
            return own
        return self._draw(x.shape[0]).to(own.device)

    def given(self, layers: Sequence[MixtureLayer], routing: Routing) -> list[GivenChoice]:
        """What each of these layers chooses and guesses."""
        first, last = layers[0].router.router.weight, layers[-1].following
        own, found = self._guessed.pop(first.data_ptr(), None), list[GivenChoice]()
        for _ in layers:
            own = own or self._next(routing, first.device)[0]
            following, guess = self._next(routing, first.device)
            found.append(GivenChoice(own, guess.experts))
            own = following
        if last is not None and own is not None:
            self.expect(last.router, own)
        return found

    def expect(self, router: Router, choice: Routed) -> None:
        """A router will choose this."""
        self._guessed[router.weight.data_ptr()] = choice

    def _next(self, routing: Routing, device: torch.device) -> tuple[Routed, Routed]:
        """The choice of one token, and a guess."""
        if routing not in self._drawn:
            rows, others = self._draw(NUM_DRAWN), self._draw(NUM_DRAWN)
            is_right = torch.rand(rows.shape, generator=self._generator) < self._share_guessed
            guesses = torch.where(is_right, rows, others)
            choices, guessed = (_chosen(each, routing, device) for each in (rows, guesses))
            self._drawn[routing] = list(zip(_rows(choices), _rows(guessed), strict=True))
        return self._random.choice(self._drawn[routing])

    def _draw(self, num_rows: int) -> Tensor:
        """Logits."""
        noise = -torch.empty(num_rows, len(self._logits)).exponential_(generator=self._generator).log()
        return self._logits + noise


class _DrawnSublayers(Sublayers):
    """Layers in one call whose experts are drawn."""

    def __init__(self, sublayers: Sublayers, drawn: DrawnRouters) -> None:
        self._sublayers = sublayers
        self._drawn = drawn

    def attend(
        self, sublayer: AttentionSublayer, hidden: Tensor, kv: LayerKV, batch: BatchLayout, turns: Turns
    ) -> tuple[Tensor, Tensor] | None:
        return self._sublayers.attend(sublayer, hidden, kv, batch, turns)

    def gated_mlp(self, weights: GatedExpert, x: Tensor, function: GatedFunction) -> Tensor | None:
        return self._sublayers.gated_mlp(weights, x, function)

    def mix(self, mixer: Mixer, x: Tensor, kv: LayerKV, batch: BatchLayout) -> Tensor | None:
        return self._sublayers.mix(mixer, x, kv, batch)

    def layers(
        self, layers: Sequence[WholeLayer], hidden: Tensor, batch: BatchLayout, function: GatedFunction
    ) -> Tensor | None:
        return self._sublayers.layers(layers, hidden, batch, function)

    def mixture(
        self,
        layers: Sequence[MixtureLayer],
        batch: BatchLayout,
        routing: Routing,
        function: GatedFunction,
        given: Sequence[GivenChoice] = (),
    ) -> MixtureSweep | None:
        given = self._drawn.given(layers, routing)
        sweep = self._sublayers.mixture(layers, batch, routing, function, given)
        if sweep is None:  # the first layer's choice may have been guessed
            self._drawn.expect(layers[0].router.router, given[0].routed)
        return sweep


def _chosen(logits: Tensor, routing: Routing, device: torch.device) -> Routed:
    scores = logits
    if routing.function != "none":
        scores = logits.softmax(-1) if routing.function == "softmax" else torch.sigmoid(logits)
    return Routed(*(each.to(device) for each in choose(scores, logits, routing)))


def _rows(routed: Routed) -> Iterator[Routed]:
    """The choices of one token after the other."""
    return map(Routed, *(torch.split(each, 1) for each in routed))
