"""Kimi Linear (arXiv 2510.26692): Kimi Delta Attention in three of four layers, latent attention without rope
in the others, and DeepSeek V3's mixture after a dense layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.model.attention.latent import LatentForm
from penstock.model.config_values import flag, num_layers_of, refuse, require
from penstock.model.families.deepseek_mixture import deepseek_mixture
from penstock.model.families.hybrid.layers import kinds_of, linear_layers, with_recurrence
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.families.mixture_frame import MixtureFamily, MixtureSpec, with_mixture
from penstock.model.mixture.mixture import MixtureNames
from penstock.model.recurrent.kimi_delta import KimiDeltaAttention
from penstock.spec import ModelSpec
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.merged_experts import rename

#: The beginning of the names of a layer's mixture.
MIXTURE_PART = "block_sparse_moe."
KIMI_NAMES = MixtureNames(
    f"{MIXTURE_PART}gate",
    f"{MIXTURE_PART}experts.",
    gate="w1",
    up="w3",
    down="w2",
    shared=f"{MIXTURE_PART}shared_experts.",
    correction=f"{MIXTURE_PART}gate.e_score_correction_bias",
)
#: Kimi's names in a config.json -> DeepSeek's.
DEEPSEEK_KEYS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_router_activation_func": "scoring_func",
}
#: The names in linear_attn_config -> those that transformers writes.
LINEAR_KEYS = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


class KimiLinear(MixtureFamily):
    """No layer has rope: the decays of the recurrent ones tell where a token is."""

    architectures = ("KimiLinearForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        require(config, "mla_use_nope", True)
        require(config, "hidden_act", "silu")
        require(config, "num_nextn_predict_layers", 0, None)
        num_layers, config = num_layers_of(config, "num_hidden_layers"), _in_usual_names(config)
        latent = LatentForm.of(config, has_bias=flag(config, "attention_bias", False))
        spec = cls._spec(config, **latent.values(config, None))
        recurrent = _recurrent_layers(config, num_layers)
        spec = with_recurrence(spec, KimiDeltaAttention.of(config), recurrent)
        mixture = replace(deepseek_mixture(config, "sigmoid", num_dense=1), names=KIMI_NAMES)
        kinds = kinds_of(config, ("mlp_layer_types",), num_layers)
        if kinds is not None:
            sparse = frozenset(index for index, kind in enumerate(kinds) if kind == "sparse")
            mixture = replace(mixture, layers=sparse)
        return with_mixture(spec, mixture)

    @classmethod
    def separate(cls, checkpoint: Checkpoint, spec: ModelSpec) -> Checkpoint:
        """transformers saves the mlp of a dense layer under the mixture's name."""
        assert isinstance(spec, MixtureSpec)
        for index in set(range(spec.num_layers)) - spec.mixture.layers:
            prefix = spec.mixture.prefix.format(index)
            for part in (*cls.gate_up_parts, cls.down_part):
                saved, usual = f"{prefix}{MIXTURE_PART}{part}.weight", f"{prefix}{cls.mlp_part}{part}.weight"
                rename(checkpoint, saved, usual)
        return super().separate(checkpoint, spec)


def _in_usual_names(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json of Kimi's or of transformers', with the names that both share with other models."""
    linear = config.get("linear_attn_config") or {}
    if not isinstance(linear, dict):
        refuse("linear_attn_config", linear, "an object")
    pairs = [(usual, config.get(name)) for name, usual in DEEPSEEK_KEYS.items()]
    pairs += [(usual, linear.get(name)) for name, usual in LINEAR_KEYS.items()]
    return config | {usual: value for usual, value in pairs if value is not None}


def _recurrent_layers(config: dict[str, Any], num_layers: int) -> frozenset[int]:
    """By the kind of each layer, or by Kimi's list of the recurrent ones, which counts from 1. Raises
    InvalidConfig."""
    named = linear_layers(config, num_layers)
    if named is not None:
        return named
    layers = (config.get("linear_attn_config") or {}).get("kda_layers")
    if not isinstance(layers, list) or not all(layer in range(1, num_layers + 1) for layer in layers):
        refuse("linear_attn_config.kda_layers", layers, f"a list of layers from 1 to {num_layers}")
    return frozenset(layer - 1 for layer in layers)
