"""LayerViews: the weights of layers as views of the buffers in which their units lie. Each is made once: a
dozen views take a tenth of a millisecond."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from penstock.spec import UnitKey
from penstock.weights.layer_weights import LayerWeights, NextExperts, no_experts
from penstock.weights.tensors import Unit
from penstock.weights.tiers.lane_tiers import LaneTiers

if TYPE_CHECKING:
    from penstock.weights.expert_lender import ExpertLender
    from penstock.weights.split.shared_rows import SharedRows


class LayerViews:
    """Of one model's dense units."""

    def __init__(
        self,
        units: Mapping[UnitKey, Unit],
        layers: Sequence[tuple[UnitKey, ...]],
        tiers: LaneTiers,
        lender: ExpertLender | None,
        shared: SharedRows | None,
    ) -> None:
        """`layers`: the units of each layer, in the order of a sweep over all stacks. `lender` lends the
        layers' experts. `shared`: the processor computes rows that lie in RAM."""
        self._units, self._layers = units, layers
        self._places = {keys[0]: place for place, keys in enumerate(layers)}
        self._tiers, self._lender, self._shared = tiers, lender, shared
        self._views: dict[tuple[UnitKey, tuple[int, ...], float], LayerWeights] = {}

    def of(self, keys: Sequence[UnitKey], buffers: Sequence[Tensor]) -> LayerWeights:
        """The weights of a layer's units together, which lie in these buffers."""
        share = 1.0 if self._shared is None or len(keys) == 1 else self._shared.brought(keys[1])
        place = keys[0], tuple([buffer.data_ptr() for buffer in buffers]), share
        weights = self._views.get(place)
        if weights is None:
            weights = self._views[place] = self._made(keys, buffers, share)
            weights.next_experts = self._next_experts(keys[0])
            if self._lender is not None and self._lender.lends_arriving:
                weights.ask_arriving = partial(self._lender.arriving_groups, keys[0])
                weights.take_present = partial(self._lender.take_present, keys[0])
                if "router" in weights:
                    weights.expert_run = self._lender.run(keys[0])
        return weights

    def upper_planes(self) -> list[LayerWeights]:
        """The dense unit of each layer without its lower planes; [] as long as one is not there, or does not
        stay."""
        found = list[LayerWeights]()
        for key, *_ in self._layers:
            buffer = self._tiers.nearest.settled(key)
            if buffer is None:
                return []
            found.append(LayerWeights.views(self._units[key].layout, buffer))
        return found

    def clear(self) -> None:
        """Forget the views, which keep buffers."""
        self._views.clear()

    def _made(self, keys: Sequence[UnitKey], buffers: Sequence[Tensor], share: float) -> LayerWeights:
        """share: what the link brings of a rest in RAM."""
        ask = partial(self._lender.groups, keys[0]) if self._lender is not None else no_experts
        weights, *second = (
            LayerWeights.views(self._units[key].layout, buffer, ask)
            for key, buffer in zip(keys, buffers, strict=True)
        )
        if not second:
            return weights
        if self._shared is None:
            return weights.with_lower_planes(second[0])
        rest = self._tiers.farthest.settled(keys[1])
        assert rest is not None, "a rest stays in RAM, and has come from there"
        in_ram = LayerWeights.views(self._units[keys[1]].layout, rest)
        return self._shared.weights(weights, second[0], in_ram, share)

    def _next_experts(self, key: UnitKey) -> NextExperts | None:
        """What a layer may know of the experts of the layer that follows."""
        lender, place = self._lender, self._places[key] + 1
        following = self._layers[place] if place < len(self._layers) else ()
        # The router is in the first unit, even where a card keeps but a share of the layer.
        has_router = len(following) == 1 or (len(following) == 2 and self._shared is not None)
        if lender is None or not lender.takes_guesses or not has_router or following[0].stack != key.stack:
            return None
        return NextExperts(partial(self._in_memory, following[0]), partial(lender.expect, following[0]))

    def _in_memory(self, key: UnitKey) -> LayerWeights | None:
        """The weights of a layer that stays in memory, once they are there."""
        buffer = self._tiers.nearest.settled(key)
        return None if buffer is None else self.of((key,), (buffer,))
