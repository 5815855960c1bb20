"""Sublayers: parts of a layer, and several layers, in one call of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from penstock.kernels.experts import GatedExpert
from penstock.kernels.mixture.routing import Routing
from penstock.kernels.operands import BatchLayout, GatedFunction, LayerKV
from penstock.kernels.sublayers.attention_sublayer import AttentionSublayer, Turns
from penstock.kernels.sublayers.mixture_layer import GivenChoice, MixtureLayer, MixtureSweep
from penstock.kernels.sublayers.whole_layer import WholeLayer

if TYPE_CHECKING:
    from penstock.kernels.sublayers.mixer import Mixer


class Sublayers(Protocol):
    """Part of Kernels. Results have the bits of the operations one by one. None as a result: these kernels
    don't compute this in one call, with these weights or so many tokens, and nothing was written."""

    def attend(
        self, sublayer: AttentionSublayer, hidden: Tensor, kv: LayerKV, batch: BatchLayout, turns: Turns
    ) -> tuple[Tensor, Tensor] | None:
        """`summed` and `normed`, each [num_tokens, hidden_size]; the step's K and V are written."""

    def gated_mlp(self, weights: GatedExpert, x: Tensor, function: GatedFunction) -> Tensor | None:
        """down(f(gate x) * up x): [num_tokens, hidden_size] -> the same shape."""

    def mix(self, mixer: Mixer, x: Tensor, kv: LayerKV, batch: BatchLayout) -> Tensor | None:
        """What a recurrent layer makes of normed x [num_tokens, hidden_size], of any number of tokens: the
        same shape; its states are brought up to date. None also where the step's rows have an order of their
        own for states."""

    def layers(
        self, layers: Sequence[WholeLayer], hidden: Tensor, batch: BatchLayout, function: GatedFunction
    ) -> Tensor | None:
        """The hidden state after layers that follow each other, with gated mlps of one `function`
        and one factor: [num_tokens, hidden_size] -> the same shape; the step's K and V are written in all of
        them, and states brought up to date."""

    def mixture(
        self,
        layers: Sequence[MixtureLayer],
        batch: BatchLayout,
        routing: Routing,
        function: GatedFunction,
        given: Sequence[GivenChoice] = (),
    ) -> MixtureSweep | None:
        """Layers that follow each other, in a step of one token. `given`: of each layer, what it takes in
        place of its router's choice."""
