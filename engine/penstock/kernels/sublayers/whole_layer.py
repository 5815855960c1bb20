"""WholeLayer: a layer with everything that it computes with in one step, so that some kernels compute several
layers in one call."""

from __future__ import annotations

from typing import NamedTuple

from penstock.kernels.experts import GatedExpert
from penstock.kernels.operands import LayerKV, address
from penstock.kernels.sublayers.attention_sublayer import AttentionSublayer, Turns


class WholeLayer(NamedTuple):
    """summed, normed = attention(hidden); the layer's result is summed + mlp(normed)."""

    attention: AttentionSublayer
    mlp: GatedExpert
    kv: LayerKV
    turns: Turns

    @property
    def numbers(self) -> tuple[int, ...]:
        """The whole_layer of cpu/sublayers/layers.h, number by number. Its matrices are those that compiled
        kernels of the host know."""
        assert self.mlp.native is not None
        return attention_numbers(self.attention, self.mlp.native.address, self.kv, self.turns)


def attention_numbers(attention: AttentionSublayer, mlp: int, kv: LayerKV, turns: Turns) -> tuple[int, ...]:
    """The whole_layer of cpu/sublayers/layers.h, number by number, with an mlp at this address."""
    known, (cos, sin) = attention.native, turns
    assert known is not None
    half = 0 if cos is None else cos.shape[1]
    k, v, *sizes = kv.native
    return (known.address, mlp, address(cos) or 0, address(sin) or 0, half, k, v or 0, *sizes)
