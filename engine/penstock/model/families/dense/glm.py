"""GLM-4 (arXiv 2406.12793) and GLM-4-0414 have Llama's layer, with rope on neighbouring dimensions of half a
head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.model.config_values import count, flag
from penstock.model.families.llama import Llama
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.rope import read_rope, rotary_dim


class Glm(Llama):
    """Checkpoints have gate and up in one tensor. q, k and v have biases."""

    architectures = ("GlmForCausalLM",)
    gate_up_parts = ("gate_up_proj",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        heads = count(config, "num_attention_heads")
        head_dim = count(config, "head_dim", default=count(config, "hidden_size") // heads)
        rope = read_rope(config, rotary_dim(config, head_dim, 0.5))
        has_bias = flag(config, "attention_bias", True)
        return cls._spec(config, rope=replace(rope, is_interleaved=True), has_qkv_bias=has_bias)


class Glm4(Glm):
    """GLM-4-0414 has norms after attention and mlp as well."""

    architectures = ("Glm4ForCausalLM",)
    norm_parts = Glm.norm_parts | {
        "attention_out_norm": "post_self_attn_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
    }

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        return replace(super().read_spec(config), norm_places="both")
