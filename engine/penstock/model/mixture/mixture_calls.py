"""MixtureCalls: several layers with experts in one call of the kernels, for one token, as far as their
experts are in memory. The plain form is Llama.layer() with mixture_mlp()."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import Tensor

from penstock.kernels import BatchLayout, LayerKV
from penstock.kernels.sublayers.mixture_layer import (
    ExpertRouter,
    MixtureLayer,
    MixtureRun,
    MixtureSweep,
    SharedExpert,
)
from penstock.model.attention.sublayer import SublayerCalls, turns_of
from penstock.model.mixture.mixture import Mixture, mixed
from penstock.spec import UnitKey
from penstock.weights.expert_table import ExpertRun
from penstock.weights.layer_weights import LayerWeights

if TYPE_CHECKING:
    from penstock.model.families.llama_architecture import LlamaArchitecture


class MixtureCalls:
    """Computes the layers of one family. Their routers are known by the layers' weights."""

    def __init__(self, attentions: SublayerCalls) -> None:
        self._attentions = attentions
        # As in SublayerCalls, which says why the family is not kept.
        self._routers = WeakKeyDictionary[LayerWeights, ExpertRouter]()

    def layers(
        self,
        family: LlamaArchitecture,
        mixture: Mixture,
        indices: Sequence[int],
        weights: Sequence[LayerWeights],
        hidden: Tensor,
        caches: Sequence[LayerKV],
        batch: BatchLayout,
        go_on: Callable[[], object],
    ) -> Tensor | None:
        """Family.layers() of layers of which each has experts."""
        sublayers, runs = family.kernels.sublayers, [own for each in weights if (own := each.expert_run)]
        if sublayers is None or len(runs) < len(weights) or len(hidden) != 1 or batch.copied_rows is not None:
            return None
        together = self._together(family, mixture, indices, weights, caches, batch)
        if together is None:
            return None
        sweep = sublayers.mixture(together, batch, mixture.routing, mixture.function)
        return None if sweep is None else _compute(family, mixture, sweep, runs, weights, hidden, go_on)

    def _together(
        self,
        family: LlamaArchitecture,
        mixture: Mixture,
        indices: Sequence[int],
        weights: Sequence[LayerWeights],
        caches: Sequence[LayerKV],
        batch: BatchLayout,
    ) -> list[MixtureLayer] | None:
        """None: the kernels have no call for one of these layers."""
        together = list[MixtureLayer]()
        behind = [*weights[1:], *_behind(weights[-1])]
        for place, (index, own, kv) in enumerate(zip(indices, weights, caches, strict=True)):
            attention = self._attentions.sublayer(family, index, own)
            if attention is None or attention.native is None or "router" not in own:
                return None
            following = behind[place] if place < len(behind) and own.next_experts is not None else None
            router = self._router(following) if following is not None and "router" in following else None
            turns = turns_of(family, index, batch)
            gate = own.vector("shared_gate") if mixture.has_shared_gate else None
            shared = SharedExpert(own.gated, gate) if mixture.shared_size else None
            together.append(MixtureLayer(attention, kv, turns, self._router(own), shared, router))
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
    family: LlamaArchitecture,
    mixture: Mixture,
    sweep: MixtureSweep,
    runs: Sequence[ExpertRun],
    weights: Sequence[LayerWeights],
    hidden: Tensor,
    go_on: Callable[[], object],
) -> Tensor:
    """The hidden state after all layers of a sweep."""
    done, is_begun = 0, False
    while done < len(weights):
        run = _run(sweep, runs, done, hidden, is_begun)
        hidden, done, is_begun, stop = run.hidden, run.end, False, run.stop
        if stop is None:
            break
        go_on()
        behind, guess = weights[done].next_experts, None
        if behind is not None and stop.guessed is not None:
            guess = partial(behind.expect, stop.guessed)
        if stop.are_there and guess is not None:
            guess()
            is_begun = True
        else:
            hidden = mixed(family, weights[done], stop.normed, mixture, stop.routed, guess, stop.summed)
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
