"""Mixtures whose routers have a sigmoid and a correction, as DeepSeek V3 has them, and attention of Llama's
kind: GLM-4.5 (arXiv 2508.06471), dots.llm1 (arXiv 2506.05767), MiniMax-M2, Solar Open, Hunyuan 3."""

from __future__ import annotations

from typing import Any

from penstock.kernels import Routing
from penstock.model.architecture import sliding_windows
from penstock.model.config_values import count, flag, num_experts_of, num_layers_of, number, require
from penstock.model.families.deepseek_mixture import deepseek_mixture, num_extra_layers
from penstock.model.families.llama import HEAD_NORMS, Qwen3
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.families.mixture_frame import (
    MixtureFamily,
    all_layers,
    chosen_of,
    typed_layers,
    with_mixture,
)
from penstock.model.families.mixtures import MIXTRAL_NAMES
from penstock.model.heads.mtp import MTPHead
from penstock.model.layers import PLAIN, AttentionForm
from penstock.model.mixture.mixture import Mixture, MixtureNames
from penstock.model.norms import HeadNorms
from penstock.model.rope import read_rope, rotary_dim


class Glm4Moe(MixtureFamily):
    """GLM-4.5: rope on half a head, and biases on q, k and v."""

    architectures = ("Glm4MoeForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        heads = count(config, "num_attention_heads")
        head_dim = count(config, "head_dim", default=count(config, "hidden_size") // heads)
        spec = cls._spec(
            config,
            has_qkv_bias=flag(config, "attention_bias", False),
            rope=read_rope(config, rotary_dim(config, head_dim, 0.5)),
            attention=HEAD_NORMS if flag(config, "use_qk_norm", False) else PLAIN,
        )
        mixture = deepseek_mixture(config, "sigmoid", num_dense=1)
        return with_mixture(spec, mixture, num_extra_layers=num_extra_layers(config))


class Dots1(MixtureFamily, Qwen3):
    """dots.llm1: Qwen3's attention."""

    architectures = ("Dots1ForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        mixture = deepseek_mixture({"norm_topk_prob": False} | config, "sigmoid")
        return with_mixture(super().read_spec(config), mixture)

    @classmethod
    def _windows(cls, config: dict[str, Any]) -> tuple[int, ...]:
        windows = sliding_windows(config, num_layers_of(config, "num_hidden_layers"))
        if config.get("layer_types") is not None:
            return windows
        first = number(config, "max_window_layers", 62)
        windows = tuple(window if index >= first else 0 for index, window in enumerate(windows))
        return windows if any(windows) else ()


class MiniMaxM2(MixtureFamily):
    """MiniMax-M2: norms over the whole rows of q and k, and rope on a part of each head."""

    architectures = ("MiniMaxM2ForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        require(config, "scoring_func", "sigmoid")
        require(config, "use_qk_norm", True)
        require(config, "qk_norm_type", "per_layer")
        require(config, "use_routing_bias", True)
        require(config, "shared_intermediate_size", 0, None)
        config = {"head_dim": 128, "rope_theta": 5e6} | config
        head_dim = count(config, "head_dim")
        rotated = count(config, "rotary_dim", default=rotary_dim(config, head_dim))
        norms = AttentionForm(norms=HeadNorms(is_whole=True))
        spec = cls._spec(config, rope=read_rope(config, rotated), attention=norms)
        num_experts = num_experts_of(config, "num_local_experts", "num_experts")
        chosen = chosen_of(config, num_experts)
        routing = Routing(num_experts, chosen, "sigmoid", is_renormalized=True, has_correction=True)
        size, layers = spec.intermediate_size, all_layers(spec)
        return with_mixture(spec, Mixture(routing, spec.hidden_size, size, layers, names=MIXTRAL_NAMES))


class SolarOpen(MixtureFamily):
    """Solar Open: Llama's attention, and experts in every layer."""

    architectures = ("SolarOpenForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        require(config, "first_k_dense_replace", 0, None)
        require(config, "use_qk_norm", False, None)
        config = {"head_dim": 128, "rope_theta": 1e6, "n_shared_experts": 1} | config
        # No layer has an mlp of this width, and transformers' config.json says nothing of it.
        config = {"intermediate_size": count(config, "moe_intermediate_size")} | config
        spec = cls._spec(config, has_qkv_bias=flag(config, "attention_bias", False))
        return with_mixture(spec, deepseek_mixture(config, "sigmoid"))


class HYV3(MixtureFamily):
    """Hunyuan 3: Qwen3's attention, and a shared expert."""

    architectures = ("HYV3ForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        for name in ("qk_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias", "route_norm"):
            require(config, name, True, None)
        has_bias = flag(config, "attention_bias", False)
        spec = cls._spec(
            {"rope_theta": 11158840.0, "head_dim": 128} | config,
            has_qkv_bias=has_bias,
            has_o_bias=has_bias,
            has_mlp_bias=flag(config, "mlp_bias", False),
            attention=HEAD_NORMS,
        )
        num_experts = num_experts_of(config, "num_experts", "num_local_experts")
        routing = Routing(
            num_experts,
            chosen_of(config, num_experts),
            "sigmoid",
            is_renormalized=True,
            scaling=number(config, "router_scaling_factor", 2.826),
            has_correction=True,
        )
        size = count(config, "moe_intermediate_size", "expert_hidden_dim")
        mixture = Mixture(
            routing,
            spec.hidden_size,
            size,
            typed_layers(config, spec.num_layers, int(number(config, "first_k_dense_replace", 1))),
            shared_size=count(config, "num_shared_experts", default=1) * size,
            names=MixtureNames("mlp.router.gate", shared="mlp.shared_mlp.", correction="mlp.expert_bias"),
        )
        # Files have one layer more, which guesses further tokens.
        extra = num_extra_layers({"num_nextn_predict_layers": 1} | config)
        return with_mixture(spec, mixture, num_extra_layers=extra)

    @classmethod
    def mtp_head(cls, spec: LlamaSpec) -> MTPHead | None:
        return None
