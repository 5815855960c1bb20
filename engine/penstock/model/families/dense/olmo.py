"""OLMo 1 (arXiv 2402.00838), 2 (arXiv 2501.00656) and 3 (arXiv 2512.13961)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.model.architecture import layer_kinds, sliding_windows
from penstock.model.config_values import flag, num_layers_of, number
from penstock.model.families.llama import Llama
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.layers import AttentionForm
from penstock.model.norms import HeadNorms, Norm
from penstock.model.rope import FULL, WINDOW, context_length, read_layer_ropes


class Olmo(Llama):
    """Llama with layer norms that have neither weights nor biases. Some models limit q, k and v."""

    architectures = ("OlmoForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        has_bias = flag(config, "attention_bias", False)
        return cls._spec(
            config,
            has_qkv_bias=has_bias,
            has_o_bias=has_bias,
            norm_eps=1e-5,
            norm=Norm(is_centred=True, has_weight=False),
            attention=AttentionForm(clip=number(config, "clip_qkv", 0.0)),
        )


class Olmo2(Llama):
    """Norms after attention and mlp, and over all heads of q and k together."""

    architectures = ("Olmo2ForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        has_bias = flag(config, "attention_bias", False)
        return cls._spec(
            config,
            has_qkv_bias=has_bias,
            has_o_bias=has_bias,
            norm_places="after",
            attention=AttentionForm(norms=HeadNorms(is_whole=True)),
        )


class Olmo3(Olmo2):
    """OLMo 2 with windows in three of four layers. Rope is scaled in full layers only."""

    architectures = ("Olmo3ForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        num_layers = num_layers_of(config, "num_hidden_layers")
        kinds = layer_kinds(config, num_layers, period=4)
        config = {"sliding_window": 4096} | config | {"layer_types": list(kinds)}
        base = super().read_spec(config | {"rope_parameters": None, "rope_scaling": None})
        theta = number(config, "rope_theta", 500000.0)
        ropes = read_layer_ropes(config, base.head_dim, (*kinds, FULL), {FULL: theta, WINDOW: theta})
        return replace(
            base,
            rope=ropes[-1],
            layer_ropes=ropes[:-1],
            max_position_embeddings=context_length(ropes[-1], base.max_position_embeddings),
            sliding_windows=sliding_windows(config, num_layers),
        )
