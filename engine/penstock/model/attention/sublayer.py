"""SublayerCalls: in one call of the kernels, a layer of Llama's frame from its hidden state to the input of
its mlp, or several layers, where layers and kernels allow it. The plain form is Llama.layer()."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import Tensor

from penstock.kernels import BatchLayout, LayerKV
from penstock.kernels.sublayers.attention_sublayer import AttentionSublayer, Turns
from penstock.kernels.sublayers.native import MOST_TOKENS
from penstock.kernels.sublayers.whole_layer import WholeLayer
from penstock.model.norms import RMS, HeadNorms, Norm
from penstock.weights.layer_weights import LayerWeights

if TYPE_CHECKING:
    from penstock.model.families.llama_architecture import LlamaArchitecture


class SublayerCalls:
    """The layers of one family, known by their weights."""

    def __init__(self) -> None:
        # The family has this object, which therefore doesn't keep the family: a cycle would keep a card's
        # memory until Python looks for cycles.
        self._known = WeakKeyDictionary[LayerWeights, AttentionSublayer | None]()

    def attend(
        self,
        family: LlamaArchitecture,
        index: int,
        weights: LayerWeights,
        hidden: Tensor,
        kv: LayerKV,
        batch: BatchLayout,
    ) -> tuple[Tensor, Tensor] | None:
        """The hidden state after attention, and its norm. None: nothing was computed."""
        sublayers = family.kernels.sublayers
        if sublayers is None or weights.adapted is not None or batch.copied_rows is not None:
            return None
        sublayer = self.sublayer(family, index, weights)
        if sublayer is None:
            return None
        return sublayers.attend(sublayer, hidden, kv, batch, turns_of(family, index, batch))

    def layers(
        self,
        family: LlamaArchitecture,
        indices: Sequence[int],
        weights: Sequence[LayerWeights],
        hidden: Tensor,
        caches: Sequence[LayerKV],
        batch: BatchLayout,
    ) -> Tensor | None:
        """The hidden state after layers with gated mlps. None: nothing was computed."""
        sublayers = family.kernels.sublayers
        if sublayers is None or batch.copied_rows is not None or len(hidden) > MOST_TOKENS:
            return None
        together = list[WholeLayer]()
        for index, own, kv in zip(indices, weights, caches, strict=True):
            sublayer = self.sublayer(family, index, own)
            if sublayer is None:
                return None
            together.append(WholeLayer(sublayer, own.gated, kv, turns_of(family, index, batch)))
        return sublayers.layers(together, hidden, batch, family.spec.activation)

    def sublayer(
        self, family: LlamaArchitecture, index: int, weights: LayerWeights
    ) -> AttentionSublayer | None:
        sublayer = self._known.get(weights, self)
        if isinstance(sublayer, SublayerCalls):
            sublayer = self._known[weights] = _sublayer(family, index, weights)
        return sublayer


def turns_of(family: LlamaArchitecture, index: int, batch: BatchLayout) -> Turns:
    rope = family.ropes[index]
    return (None, None) if rope is None else rope.at(batch)


def _sublayer(family: LlamaArchitecture, index: int, weights: LayerWeights) -> AttentionSublayer | None:
    """A layer whose parts AttentionSublayer has, and no others."""
    spec, form, rope, attention = (
        family.spec,
        family.spec.attention,
        family.ropes[index],
        family.attentions[index],
    )
    norms = form.norms or HeadNorms()
    has_others = (
        spec.norm_places != "before" or spec.is_parallel or spec.branch_factor != 1 or spec.latent is not None
        or form.is_grouped or form.clip or form.growth is not None or form.has_gate
        or form.out_gate is not None
        or norms.has_own_weights or attention.alibi_slopes is not None or attention.distance_bias is not None
        or "qkv" not in weights
    )  # fmt: skip
    if has_others or not (_is_rms(spec.norm) and _is_rms(norms.norm)):
        return None
    return AttentionSublayer(
        weights.matrix("qkv"),
        weights.matrix("o"),
        weights.optional("qkv.bias"),
        weights.optional("o.bias"),
        weights.vector("input_norm"),
        weights.vector("post_norm"),
        weights.vector("q_norm") if form.norms else None,
        weights.vector("k_norm") if form.norms else None,
        norms.is_after_rope,
        norms.is_whole,
        spec.norm_eps,
        spec.norm.offset,
        norms.norm.offset,
        replace(attention, sinks=weights.vector("sinks")) if form.has_sinks else attention,
        rope is not None and rope.is_interleaved,
    )


def _is_rms(norm: Norm) -> bool:
    """Whether a norm is Llama's, but for its offset."""
    return replace(norm, offset=0.0) == RMS
