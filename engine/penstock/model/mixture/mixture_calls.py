"""MixtureCalls: several layers with experts in one call of the kernels, for one token, as far as their
experts are in memory. The plain form is Llama.layer() with mixture_mlp()."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import Tensor

from penstock.kernels.sublayers.mixture_layer import (
    ExpertRouter,
    MixtureLayer,
    MixtureRun,
    MixtureSweep,
    SharedExpert,
)
from penstock.kernels.sublayers.whole_layer import FirstHalf
from penstock.model.attention.sublayer import SublayerCalls, turns_of
from penstock.model.layer_run import LayerRun
from penstock.model.mixture.mixture import Mixture, mixed
from penstock.spec import UnitKey
from penstock.weights.expert_table import ExpertRun
from penstock.weights.layer_weights import LayerWeights

if TYPE_CHECKING:
    from penstock.model.families.mixture_frame import MixtureFamily


class MixtureCalls:
    """Computes the layers of one family. Their routers are known by the layers' weights."""

    def __init__(self, attentions: SublayerCalls) -> None:
        self._attentions = attentions
        # As in SublayerCalls, which says why the family is not kept.
        self._routers = WeakKeyDictionary[LayerWeights, ExpertRouter]()

    def first_half(self, family: MixtureFamily, index: int, weights: LayerWeights) -> FirstHalf | None:
        """SublayerCalls.sublayer()"""
        return self._attentions.sublayer(family, index, weights)

    def layers(self, family: MixtureFamily, mixture: Mixture, run: LayerRun, hidden: Tensor) -> Tensor | None:
        """Layers with experts, whose first halves kernels know. None: nothing was computed."""
        sublayers, batch = family.kernels.sublayers, run.batch
        if sublayers is None or len(hidden) != 1 or batch.copied_rows is not None:
            return None
        together = self._together(family, mixture, run)
        sweep = sublayers.mixture(together, batch, mixture.routing, mixture.function)
        return None if sweep is None else _compute(family, mixture, sweep, run, hidden)

    def _together(self, family: MixtureFamily, mixture: Mixture, run: LayerRun) -> list[MixtureLayer]:
        together, weights, batch = list[MixtureLayer](), run.weights, run.batch
        behind = [*weights[1:], *_behind(weights[-1])]
        for place, (index, own, kv) in enumerate(zip(run.indices, weights, run.caches, strict=True)):
            first = self.first_half(family, index, own)
            assert first is not None
            following = behind[place] if place < len(behind) and own.next_experts is not None else None
            router = self._router(following) if following is not None and "router" in following else None
            turns = turns_of(family, index, batch)
            gate = own.vector("shared_gate") if mixture.has_shared_gate else None
            shared = SharedExpert(own.gated, gate) if mixture.shared_size else None
            together.append(MixtureLayer(first, kv, turns, self._router(own), shared, router))
        return together

    def _router(self, weights: LayerWeights) -> ExpertRouter:
        router, run = self._routers.get(weights), weights.expert_run
        if router is None:
            assert run is not None
            router = self._routers[weights] = ExpertRouter(weights.router, run.table.address, run.table)
        return router


def _behind(weights: LayerWeights) -> list[LayerWeights]:
    """The layer after a layer, if it is in memory and takes guesses."""
    behind = weights.next_experts.weights() if weights.next_experts is not None else None
    return [] if behind is None else [behind]


def _compute(
    family: MixtureFamily, mixture: Mixture, sweep: MixtureSweep, whole: LayerRun, hidden: Tensor
) -> Tensor:
    """The hidden state after all layers of a sweep."""
    weights, done, is_begun = whole.weights, 0, False
    runs = [own for each in weights if (own := each.expert_run)]
    while done < len(weights):
        run = _run(sweep, runs, done, hidden, is_begun)
        hidden, done, is_begun, stop = run.hidden, run.end, False, run.stop
        if stop is None:
            break
        whole.go_on()
        behind, guess = weights[done].next_experts, None
        if behind is not None and stop.guessed is not None:
            guess = partial(behind.expect, stop.guessed)
        if stop.are_there and guess is not None:
            guess()
            is_begun = True
        else:
            factor, onto = family.spec.branch_factor, stop.summed
            rest = partial(mixed, family, weights[done], stop.normed, mixture, stop.routed, guess)
            hidden = rest(onto) if factor == 1.0 else onto + rest() * factor
            done += 1
    return hidden


def _run(
    sweep: MixtureSweep, runs: Sequence[ExpertRun], first: int, hidden: Tensor, is_begun: bool
) -> MixtureRun:
    """As many of these layers as find their experts."""
    lender, asked = runs[0], list[tuple[UnitKey, list[int]]]()
    try:
        run = sweep.run(first, hidden, lender.begin(), is_begun)
        layers = runs[first + is_begun :]  # a layer that was begun has asked
        asked = [(own.layer, numbers) for own, numbers in zip(layers, run.chosen, strict=False)]
        return run
    finally:
        lender.end(asked)
