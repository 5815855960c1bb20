"""Muse-Glimmer: Gemma 2's frame with a gate after attention, and full layers without rope."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.model.architecture import sliding_windows
from penstock.model.config_values import count, flag, num_layers_of, number, refuse
from penstock.model.families.gemma.gemma import Gemma2
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.layers import AttentionForm, OutputGate, activation_function
from penstock.model.norms import RMS, HeadNorms, Norm
from penstock.model.rope import FULL, WINDOW, read_rope
from penstock.spec import RopeSpec
from penstock.weights.layer_weights import LayerWeights


@dataclass(frozen=True, kw_only=True)
class MuseGlimmerSpec(LlamaSpec):
    """Muse-Glimmer's own value."""

    #: Of the norms after attention and mlp; norm_eps is that of all others.
    out_norm_eps: float


class MuseGlimmer(Gemma2):
    """q, k and the embedding have norms without weights. The weights of a layer's norms are stored as their
    difference from 1, those of the final norm are not."""

    architectures = ("MuseGlimmerForCausalLM",)
    spec: MuseGlimmerSpec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        config = {"head_dim": 128, "sliding_window": 2048} | config
        num_layers, head_dim = num_layers_of(config, "num_hidden_layers"), count(config, "head_dim")
        full = _full_layers(num_layers)
        kinds = [FULL if index in full else WINDOW for index in range(num_layers)]
        config = config | {"layer_types": config.get("layer_types") or kinds}
        has_bias, rope = flag(config, "attention_bias", False), read_rope(config, head_dim)
        norms = HeadNorms(Norm(has_weight=False))
        base = cls._spec(
            config,
            rope=rope,
            has_qkv_bias=has_bias,
            has_o_bias=has_bias,
            activation=activation_function(config.get("hidden_activation") or "silu"),
            norm=Norm(offset=1.0),
            norm_places="both",
            attention=AttentionForm(norms=norms, out_gate=OutputGate("gate_proj")),
            attention_scale=number(config, "qk_scale_factor", 3.87) / math.sqrt(head_dim),
            sliding_windows=sliding_windows(config, num_layers),
            layer_ropes=_layer_ropes(config, num_layers, rope),
            head_factor=number(config, "output_multiplier", 0.19611613513818404),
            logits_softcap=number(config, "final_logit_softcapping", 20.0),
        )
        return MuseGlimmerSpec(**vars(base), out_norm_eps=number(config, "post_norm_eps", 1e-8))

    def scale_tokens(self, vectors: Tensor) -> Tensor:
        ones = vectors.new_ones(vectors.shape[-1])
        return self.host_kernels.rms_norm(vectors, ones, self.spec.norm_eps)

    def norm_final(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        normed = RMS.apply(self.kernels, weights, "final_norm", hidden, self.spec.norm_eps)
        return normed * self.spec.head_factor

    def _behind(self, name: str, weights: LayerWeights, x: Tensor) -> Tensor:
        return self.spec.norm.apply(self.kernels, weights, name, x, self.spec.out_norm_eps)


def _layer_ropes(config: dict[str, Any], num_layers: int, rope: RopeSpec) -> tuple[RopeSpec | None, ...]:
    """The rope of each layer. `layer_rope_theta` has 0 for a layer without; all others have one base."""
    full, thetas = _full_layers(num_layers), config.get("layer_rope_theta")
    if thetas is None:
        thetas = [0 if index in full else rope.theta for index in range(num_layers)]
    if not isinstance(thetas, list) or len(thetas) != num_layers or not {*thetas} <= {0, rope.theta}:
        refuse("layer_rope_theta", thetas, f"a list with 0 or rope_theta for each of {num_layers} layers")
    return tuple(rope if theta else None for theta in thetas)


def _full_layers(num_layers: int) -> range:
    """Where config.json does not tell: every fourth layer, counted from the last."""
    return range((num_layers - 1) % 4, num_layers, 4)
