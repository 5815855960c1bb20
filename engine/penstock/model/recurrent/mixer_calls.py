"""MixerCalls: what recurrent layers compute, in one call of the kernels where these have it. The plain form
is RecurrentForm.mix()."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import Tensor

from penstock.kernels import BatchLayout, LayerKV
from penstock.kernels.sublayers.mixer import Mixer
from penstock.model.family import Family
from penstock.model.recurrent.form import RecurrentForm
from penstock.weights.layer_weights import LayerWeights


class MixerCalls:
    """The layers of one form, known by their weights."""

    def __init__(self, form: RecurrentForm) -> None:
        self._form = form
        # As in SublayerCalls, which says why the family is not kept.
        self._known = WeakKeyDictionary[LayerWeights, Mixer]()

    def mix(
        self, family: Family, weights: LayerWeights, x: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        """RecurrentForm.mix()"""
        sublayers = family.kernels.sublayers
        if sublayers is not None and weights.adapted is None:
            y = sublayers.mix(self.mixer(family, weights), x, kv, batch)
            if y is not None:
                return y
        return self._form.mix(family, weights, x, kv, batch)

    def mixer(self, family: Family, weights: LayerWeights) -> Mixer:
        """A layer's weights and numbers."""
        mixer = self._known.get(weights)
        if mixer is None:
            mixer = self._known[weights] = self._form.mixer(family.spec, weights)
        return mixer
