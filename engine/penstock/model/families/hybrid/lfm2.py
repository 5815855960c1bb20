"""LFM2 and its mixtures (arXiv 2511.23404): short convolutions, and attention in some layers."""

from __future__ import annotations

from typing import Any

from penstock.kernels import Routing
from penstock.model.config_values import count, flag, number, require
from penstock.model.families.hybrid.layers import kinds_of, layers_of, with_recurrence
from penstock.model.families.llama import HEAD_NORMS, Llama
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.families.mixture_frame import MixtureFamily, chosen_of, with_mixture
from penstock.model.mixture.mixture import Mixture, MixtureNames
from penstock.model.recurrent.short_conv import GatedConv
from penstock.spec import ModelSpec


class LFM2(Llama):
    """Llama with norms on the heads of q and k, and with short convolutions in place of attention."""

    architectures = ("Lfm2ForCausalLM",)
    head_norm_parts = ("q_layernorm", "k_layernorm")
    gate_up_parts = ("w1", "w3")
    o_part, down_part, mlp_part = "out_proj", "w2", "feed_forward."
    final_norm_part = "model.embedding_norm"
    norm_parts = Llama.norm_parts | {"input_norm": "operator_norm", "post_norm": "ffn_norm"}

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        ffn = count(config, "block_ff_dim", "intermediate_size")
        if flag(config, "block_auto_adjust_ff_dim", True):
            ffn = _adjusted(config, ffn)
        return cls._recurrent_spec(config | {"intermediate_size": ffn})

    @classmethod
    def _recurrent_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        spec = cls._spec(
            {"rope_theta": config.get("theta") or 1e6} | config,
            norm_eps=number(config, "norm_eps", 1e-5),
            is_tied=flag(config, "tie_embedding", flag(config, "tie_word_embeddings", True)),
            activation="silu",
            attention=HEAD_NORMS,
        )
        width = count(config, "conv_L_cache", default=3)
        form = GatedConv(spec.hidden_size, width, flag(config, "conv_bias", False))
        return with_recurrence(spec, form, _conv_layers(config, spec))


class LFM2Moe(MixtureFamily, LFM2):
    """LFM2 with experts after the first layers, a sigmoid in the router, and a correction of its scores."""

    architectures = ("Lfm2MoeForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        spec = cls._recurrent_spec(config)
        num_experts = count(config, "num_experts", "num_local_experts")
        routing = Routing(
            num_experts,
            chosen_of(config, num_experts),
            "sigmoid",
            is_renormalized=flag(config, "norm_topk_prob", True),
            least_sum=1e-6,
            scaling=number(config, "routed_scaling_factor", 1.0),
            has_correction=flag(config, "use_expert_bias", True),
        )
        names = MixtureNames(
            "feed_forward.gate",
            "feed_forward.experts.",
            *("w1", "w3", "w2"),
            correction="feed_forward.expert_bias",
            merged_gate_up="feed_forward.experts.gate_up_proj",
            merged_down="feed_forward.experts.down_proj",
        )
        layers = frozenset(range(int(number(config, "num_dense_layers", 2)), spec.num_layers))
        size = count(config, "moe_intermediate_size")
        return with_mixture(spec, Mixture(routing, spec.hidden_size, size, layers, names=names))


def _adjusted(config: dict[str, Any], ffn: int) -> int:
    """The inner width of the mlp: two thirds of the number in config.json, times a factor, rounded up."""
    ffn = 2 * ffn // 3
    if config.get("block_ffn_dim_multiplier", 1.0) is None:
        return ffn
    unit = count(config, "block_multiple_of", default=256)
    return -(-int(number(config, "block_ffn_dim_multiplier", 1.0) * ffn) // unit) * unit


def _conv_layers(config: dict[str, Any], spec: ModelSpec) -> frozenset[int]:
    """The layers without attention."""
    everywhere = frozenset(range(spec.num_layers))
    kinds = kinds_of(config, ("layer_types",), spec.num_layers)
    if kinds is None:
        given = config.get("full_attn_idxs") is not None
        return everywhere - layers_of(config, "full_attn_idxs", spec.num_layers) if given else frozenset()
    for kind in kinds:
        require({"layer_types": kind, "model_type": "lfm2"}, "layer_types", "conv", "full_attention")
    return frozenset(index for index, kind in enumerate(kinds) if kind == "conv")
