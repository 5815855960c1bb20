"""The text part of Llama 4 (Scout and Maverick): most layers have rope and chunked attention, the others
neither, and a router's score multiplies an expert's input."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from penstock.kernels import BatchLayout, LayerKV, Routing
from penstock.model.config_values import count, flag, num_experts_of, num_layers_of, number, refuse, require
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.families.mixture_frame import MixtureFamily, MixtureSpec, chosen_of, with_mixture
from penstock.model.layers import PLAIN, AttentionForm, QueryGrowth, attend
from penstock.model.mixture.mixture import Mixture, MixtureNames
from penstock.model.norms import HeadNorms, Norm
from penstock.model.rope import FULL, read_rope
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec

#: A kind of layers, as config.json names it in `layer_types`.
CHUNKED = "chunked_attention"
#: The names of Llama 4's modules.
NAMES = MixtureNames(
    "feed_forward.router",
    "feed_forward.experts.",
    shared="feed_forward.shared_expert.",
    merged_gate_up="feed_forward.experts.gate_up_proj",
    merged_down="feed_forward.experts.down_proj",
)


@dataclass(frozen=True, kw_only=True)
class Llama4Spec(MixtureSpec):
    """Attention in layers without rope. LlamaSpec.attention is the form of the layers with rope."""

    without_rope: AttentionForm


class Llama4(MixtureFamily):
    """Every token passes through a shared expert and one other."""

    architectures = ("Llama4ForCausalLM",)
    spec: Llama4Spec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        num_layers = num_layers_of(config, "num_hidden_layers")
        heads, has_bias = count(config, "num_attention_heads"), flag(config, "attention_bias", False)
        head_dim = count(config, "head_dim", default=count(config, "hidden_size") // heads)
        rope = replace(read_rope({"rope_theta": 500000.0} | config, head_dim), is_interleaved=True)
        has_rope = _flags(config, num_layers)
        norms = HeadNorms(Norm(has_weight=False), is_after_rope=True)
        spec = cls._spec(
            config,
            rope=rope,
            layer_ropes=tuple(rope if turned else None for turned in has_rope),
            attention_chunks=_chunks(config, has_rope),
            has_qkv_bias=has_bias,
            has_o_bias=has_bias,
            attention=AttentionForm(norms=norms) if flag(config, "use_qk_norm", True) else PLAIN,
            intermediate_size=count(config, "intermediate_size_mlp", default=16384),
        )
        mixture = with_mixture(spec, _mixture(config, num_layers))
        return Llama4Spec(**vars(mixture), without_rope=AttentionForm(growth=_growth(config)))

    @classmethod
    def mlp_tensors(cls, spec: LlamaSpec, index: int, prefix: str) -> tuple[TensorSpec, ...]:
        return super().mlp_tensors(spec, index, prefix.removesuffix("mlp.") + "feed_forward.")

    def attention(
        self, index: int, weights: LayerWeights, x: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        form = self.spec.attention if self.ropes[index] is not None else self.spec.without_rope
        return attend(self, index, weights, x, kv, batch, form)


def _mixture(config: dict[str, Any], num_layers: int) -> Mixture:
    num_experts, size = (
        num_experts_of(config, "num_local_experts", "num_experts"),
        count(config, "intermediate_size"),
    )
    step, layers = count(config, "interleave_moe_layer_step", default=1), config.get("moe_layers")
    layers = range(step - 1, num_layers, step) if layers is None else layers
    if not isinstance(layers, list | range) or not all(isinstance(layer, int) for layer in layers):
        refuse("moe_layers", layers, "a list of layers")
    return Mixture(
        Routing(num_experts, chosen_of({"num_experts_per_tok": 1} | config, num_experts), "sigmoid"),
        count(config, "hidden_size"),
        size,
        frozenset(layers),
        shared_size=size,
        scales_inputs=True,
        is_merged_transposed=True,
        names=NAMES,
    )


def _flags(config: dict[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has rope. Raises InvalidConfig."""
    flags = config.get("no_rope_layers")
    if not flags:
        interval = count(config, "no_rope_layer_interval", default=4)
        return tuple((index + 1) % interval != 0 for index in range(num_layers))
    if not isinstance(flags, list) or len(flags) < num_layers or any(each not in (0, 1) for each in flags):
        refuse("no_rope_layers", flags, f"a list with 1 (rope) or 0 for each of {num_layers} layers")
    return tuple(map(bool, flags[:num_layers]))


def _chunks(config: dict[str, Any], has_rope: tuple[bool, ...]) -> tuple[int, ...]:
    """The chunk of each layer, 0 for whole attention. Raises InvalidConfig and UnsupportedModel."""
    config = {"attention_chunk_size": 8192} | config  # where the config is silent; null is no chunks
    if config["attention_chunk_size"] is None:
        return ()
    size, kinds = count(config, "attention_chunk_size"), config.get("layer_types")
    if kinds is None:
        kinds = [CHUNKED if turned else FULL for turned in has_rope]
    if not isinstance(kinds, list) or len(kinds) != len(has_rope):
        refuse("layer_types", kinds, f"a list with the kind of each of {len(has_rope)} layers")
    for kind in kinds:
        require({"layer_types": kind, "model_type": config.get("model_type")}, "layer_types", FULL, CHUNKED)
    return tuple(size if kind == CHUNKED else 0 for kind in kinds)


def _growth(config: dict[str, Any]) -> QueryGrowth | None:
    # Older configs have 4 in place of true.
    if config.get("attn_temperature_tuning") != 4 and not flag(config, "attn_temperature_tuning", True):
        return None
    rate, length = number(config, "attn_scale", 0.1), count(config, "floor_scale", default=8192)
    return QueryGrowth(rate, length, first=1)
