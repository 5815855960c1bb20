"""Gemma 1 (arXiv 2403.08295), 2 (arXiv 2408.00118) and the text part of 3 (arXiv 2503.19786). Norm weights
are stored as their difference from 1, and the embedding is scaled by sqrt(hidden_size)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from penstock.model.architecture import layer_kinds, sliding_windows
from penstock.model.config_values import count, flag, num_layers_of, number, require
from penstock.model.families.llama import Llama
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.layers import AttentionForm, activation_function
from penstock.model.norms import HeadNorms, Norm
from penstock.model.rope import FULL, WINDOW, read_layer_ropes


class Gemma(Llama):
    """Llama with a GELU in its mlp, whose head is the embedding unless the config says otherwise."""

    architectures = ("GemmaForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        function = config.get("hidden_activation") or config.get("hidden_act")
        # Early configs name the exact GELU. All Gemmas were trained with tanh's.
        return cls._gemma(config | {"hidden_activation": None if function == "gelu" else function})

    @classmethod
    def _gemma(cls, config: dict[str, Any], **differences: Any) -> LlamaSpec:
        """What all Gemmas share."""
        require(config, "use_bidirectional_attention", None, False)
        has_bias = flag(config, "attention_bias", False)
        function = config.get("hidden_activation") or "gelu_pytorch_tanh"
        return cls._spec(
            {"tie_word_embeddings": True} | config,
            has_qkv_bias=has_bias,
            has_o_bias=has_bias,
            activation=activation_function(function),
            norm=Norm(offset=1.0),
            embedding_factor=math.sqrt(count(config, "hidden_size")),
            **differences,
        )


class Gemma2(Gemma):
    """Gemma with four norms in a layer, soft caps, and a window in every second layer."""

    architectures = ("Gemma2ForCausalLM",)
    norm_parts = Gemma.norm_parts | {"post_norm": "pre_feedforward_layernorm"}

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        # What transformers takes where config.json has no such key; null means none.
        config = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} | config
        config = {"sliding_window": 4096} | config
        num_layers = num_layers_of(config, "num_hidden_layers")
        types = config.get("layer_types") or [
            "full_attention" if index % 2 else "sliding_attention" for index in range(num_layers)
        ]
        return cls._gemma(
            config,
            norm_places="both",
            sliding_windows=sliding_windows(config | {"layer_types": types}, num_layers),
            attention_scale=number(config, "query_pre_attn_scalar", 256) ** -0.5,
            attention_softcap=number(config, "attn_logit_softcapping", 0.0),
            logits_softcap=number(config, "final_logit_softcapping", 0.0),
        )


class VaultGemma(Gemma2):
    """Gemma 2 without norms after attention and mlp (arXiv 2510.15001)."""

    architectures = ("VaultGemmaForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        return replace(super().read_spec(config), norm_places="before")


class Gemma3(Gemma2):
    """Gemma 2 without soft caps, with norms on the heads of q and k. Five of six layers have a window, and a
    rope of their own."""

    architectures = ("Gemma3ForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        config = {"attn_logit_softcapping": None, "final_logit_softcapping": None} | config
        require(config, "attn_logit_softcapping", None, 0)
        num_layers = num_layers_of(config, "num_hidden_layers")
        kinds = layer_kinds(config, num_layers, count(config, "sliding_window_pattern", default=6))
        thetas = {
            FULL: number(config, "rope_theta", 1e6),
            WINDOW: number(config, "rope_local_base_freq", 1e4),
        }
        ropes = read_layer_ropes(config, count(config, "head_dim"), (*kinds, FULL), thetas)
        return replace(
            super().read_spec(config | {"layer_types": list(kinds), "rope_parameters": None}),
            rope=ropes[-1],
            layer_ropes=ropes[:-1],
            attention=AttentionForm(norms=HeadNorms(Norm(offset=1.0))),
        )
