"""Phi-1, Phi-1.5 and Phi-2 (arXiv 2306.11644) have one norm for attention and mlp in parallel, rope on part
of each head, and biases, also in the head. Persimmon (Adept, 2023) has attention and mlp one after the other,
norms on the heads of q and k, and relu squared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.model.config_values import count, flag
from penstock.model.families.gpt.gpt import GPT
from penstock.model.families.gpt.gpt_architecture import LAYER_NORM, MODEL_NAMES, GPTSpec, Keys, partial_rope
from penstock.model.layers import AttentionForm
from penstock.model.norms import HeadNorms


class Phi(GPT):
    """Phi-3 has another layer."""

    architectures = ("PhiForCausalLM",)
    optional_prefix = "model."
    names = MODEL_NAMES._replace(
        o="self_attn.dense", up=("mlp.fc1",), down="mlp.fc2", final_norm="model.final_layernorm"
    )
    keys = Keys()
    is_tied_by_default = False

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> GPTSpec:
        return cls._spec(
            config,
            rope=partial_rope(config, 0.5),
            num_kv_heads=count(config, "num_key_value_heads", "num_attention_heads"),
            attention=_head_norms(config, False),
            has_head_bias=True,
            is_parallel=True,
            has_mlp_norm=False,
        )


class Persimmon(GPT):
    """q, k and v are fused per head."""

    architectures = ("PersimmonForCausalLM",)
    optional_prefix = "model."
    names = MODEL_NAMES._replace(
        qkv=("self_attn.query_key_value",),
        o="self_attn.dense",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        final_norm="model.final_layernorm",
    )
    keys = Keys()
    default_activation = "relu2"
    is_tied_by_default = False

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> GPTSpec:
        form = replace(_head_norms(config, True), is_grouped=True)
        return cls._spec(config, rope=partial_rope(config, 0.5), attention=form)


def _head_norms(config: dict[str, Any], default: bool) -> AttentionForm:
    """Layer norms on the heads of q and k, if config.json has them."""
    return AttentionForm(norms=HeadNorms(LAYER_NORM) if flag(config, "qk_layernorm", default) else None)
