"""SublayerCalls: in one call of the kernels, a layer of Llama's frame from its hidden state to the input of
its mlp, or several layers, where layers and kernels allow it. Layers have attention or a recurrence. The
plain form is Llama.layer()."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import Tensor

from penstock.kernels import BatchLayout, LayerKV
from penstock.kernels.sublayers.attention_sublayer import AttentionSublayer, Turns
from penstock.kernels.sublayers.native import MOST_TOKENS
from penstock.kernels.sublayers.whole_layer import FirstHalf, WholeLayer
from penstock.model.architecture import CONV
from penstock.model.layer_run import LayerRun
from penstock.model.norms import RMS, HeadNorms, Norm
from penstock.weights.layer_weights import LayerWeights

if TYPE_CHECKING:
    from penstock.model.families.llama import Llama


class SublayerCalls:
    """The layers of one family, known by their weights."""

    def __init__(self) -> None:
        # The family has this object, which therefore doesn't keep the family: a cycle would keep a card's
        # memory until Python looks for cycles.
        self._known = WeakKeyDictionary[LayerWeights, "FirstHalf | None"]()

    def attend(
        self,
        family: Llama,
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
        if not isinstance(sublayer, AttentionSublayer):
            return None
        return sublayers.attend(sublayer, hidden, kv, batch, turns_of(family, index, batch))

    def layers(self, family: Llama, run: LayerRun, hidden: Tensor) -> Tensor | None:
        """The hidden state after layers with gated mlps. None: nothing was computed."""
        sublayers, batch = family.kernels.sublayers, run.batch
        if sublayers is None or batch.copied_rows is not None or len(hidden) > MOST_TOKENS:
            return None
        together = list[WholeLayer]()
        for index, own, kv in zip(run.indices, run.weights, run.caches, strict=True):
            sublayer = self.sublayer(family, index, own)
            if sublayer is None:
                return None
            together.append(WholeLayer(sublayer, own.gated, kv, turns_of(family, index, batch)))
        return sublayers.layers(together, hidden, batch, family.spec.activation)

    def sublayer(self, family: Llama, index: int, weights: LayerWeights) -> FirstHalf | None:
        """None: kernels have no call for this layer."""
        sublayer = self._known.get(weights, self)
        if isinstance(sublayer, SublayerCalls):
            sublayer = self._known[weights] = _sublayer(family, index, weights)
        return sublayer


def turns_of(family: Llama, index: int, batch: BatchLayout) -> Turns:
    rope = family.ropes[index]
    return (None, None) if rope is None else rope.at(batch)


def _sublayer(family: Llama, index: int, weights: LayerWeights) -> FirstHalf | None:
    """A layer whose parts AttentionSublayer or RecurrentSublayer has, and no others."""
    if family.spec.norm_places != "before" or family.spec.is_parallel or not _is_rms(family.spec.norm):
        return None
    if CONV in weights:
        return _recurrent(family, weights)
    return _attention(family, index, weights)


def _recurrent(family: Llama, weights: LayerWeights) -> FirstHalf:
    from penstock.kernels.sublayers.recurrent_sublayer import RecurrentSublayer  # of hybrids alone

    spec = family.spec
    norms = weights.vector("input_norm"), weights.vector("post_norm")
    mixer = family.mixers.mixer(family, weights)
    return RecurrentSublayer(mixer, *norms, spec.norm_eps, spec.norm.offset, spec.branch_factor)


def _attention(family: Llama, index: int, weights: LayerWeights) -> AttentionSublayer | None:
    spec, form, rope, attention = (
        family.spec,
        family.spec.attention,
        family.ropes[index],
        family.attentions[index],
    )
    norms = form.norms or HeadNorms()
    is_gated_otherwise = form.has_gate and (form.norms is None or norms.is_whole or norms.is_after_rope)
    has_others = (
        spec.latent is not None or form.is_grouped or form.clip or form.growth is not None
        or is_gated_otherwise or form.out_gate is not None
        or norms.has_own_weights or attention.alibi_slopes is not None or attention.distance_bias is not None
        or "qkv" not in weights
    )  # fmt: skip
    if has_others or not _is_rms(norms.norm):
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
        spec.branch_factor,
        form.has_gate,
    )


def _is_rms(norm: Norm) -> bool:
    """Whether a norm is Llama's, but for its offset."""
    return replace(norm, offset=0.0) == RMS
