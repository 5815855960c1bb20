"""Mixtures whose routers have a sigmoid and a correction, as DeepSeek V3 has them, and attention of Llama's
kind: GLM-4.5 (arXiv 2508.06471), dots.llm1 (arXiv 2506.05767), MiniMax-M2."""

from __future__ import annotations

from typing import Any

from penstock.kernels import Routing
from penstock.model.architecture import sliding_windows
from penstock.model.config_values import count, flag, num_experts_of, num_layers_of, number, require
from penstock.model.families.deepseek_mixture import deepseek_mixture, num_extra_layers
from penstock.model.families.llama import HEAD_NORMS, Qwen3
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.families.mixture_frame import MixtureFamily, all_layers, chosen_of, with_mixture
from penstock.model.families.mixtures import MIXTRAL_NAMES
from penstock.model.layers import PLAIN, AttentionForm
from penstock.model.mixture.mixture import Mixture
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
