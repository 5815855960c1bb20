"""Ling 3 (inclusionAI/Ling-3.0-Flash): Kimi Delta Attention in five of six layers, latent attention with a
gate of each head in the others, and DeepSeek V3's mixture after two dense layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.errors import UnsupportedModel
from penstock.model.attention.latent import LatentForm
from penstock.model.config_values import count, flag, num_layers_of, refuse, require
from penstock.model.families.deepseek_mixture import deepseek_mixture, num_extra_layers
from penstock.model.families.hybrid.layers import linear_layers, with_recurrence
from penstock.model.families.llama_architecture import LlamaSpec
from penstock.model.families.mixture_frame import MixtureFamily, with_mixture
from penstock.model.layers import OutputGate
from penstock.model.recurrent.kimi_delta import KimiDeltaAttention
from penstock.model.rope import read_rope

#: What transformers takes where a config.json is silent.
_SILENT = {
    "rope_theta": 6e6,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 1,
}
#: The limits of the gates of experts and of the shared expert, a number for each layer.
_LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")


class Ling3(MixtureFamily):
    """The decay has a lower bound, and its projection and the gate's are whole matrices."""

    architectures = ("BailingHybridForCausalLM",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> LlamaSpec:
        if not any(
            config.get(name) is not None for name in ("kda_safe_gate", "kda_lower_bound", "no_kda_lora")
        ):
            raise UnsupportedModel(
                "this bailing_hybrid has lightning attention, as Ling 2.5 and 2.6 have it, and no Kimi Delta "
                "Attention; Penstock computes Ling 3"
            )
        require(config, "no_kda_lora", True, None)
        require(config, "hidden_act", "silu")
        require(config, "gated_attention_proj_granularity_type", "head_wise", None)
        for name in ("use_bias", "use_qkv_bias"):
            require(config, name, False, None)
        config, num_layers = _SILENT | config, num_layers_of(config, "num_hidden_layers")
        latent = LatentForm.of(config, has_bias=flag(config, "attention_bias", False))
        latent = replace(latent, out_gate=OutputGate("g_proj", is_per_head=True))
        rope = replace(read_rope(config, latent.rope_dim), is_interleaved=True)
        spec = cls._spec(config, **latent.values(config, rope))
        spec = with_recurrence(spec, _delta(config), _recurrent_layers(config, num_layers))
        mixture = replace(
            deepseek_mixture(config, "sigmoid", num_dense=2),
            limits=_limits(config, num_layers),
            limits_behind=True,
        )
        return with_mixture(spec, mixture, num_extra_layers=num_extra_layers(config))


def _delta(config: dict[str, Any]) -> KimiDeltaAttention:
    bound = config.get("kda_lower_bound", -5.0)
    if not isinstance(bound, int | float) or not bound < 0:
        refuse("kda_lower_bound", bound, "a number below 0")
    return KimiDeltaAttention(
        count(config, "linear_num_heads", default=count(config, "num_attention_heads")),
        count(config, "linear_head_dim", default=count(config, "head_dim", default=128)),
        count(config, "linear_conv_kernel_dim", "short_conv_kernel_size", default=4),
        is_narrow=False,
        lower_bound=float(bound) if flag(config, "kda_safe_gate", True) else None,
    )


def _recurrent_layers(config: dict[str, Any], num_layers: int) -> frozenset[int]:
    """All but the last layer of each group, unless config.json names the layers' kinds."""
    named = linear_layers(config, num_layers)
    if named is not None:
        return named
    size = count(config, "layer_group_size", default=6)
    return frozenset(index for index in range(num_layers) if (index + 1) % size)


def _limits(config: dict[str, Any], num_layers: int) -> tuple[tuple[float, float], ...]:
    """Mixture.limits. Raises InvalidConfig."""
    lists = []
    for name in _LIMITS:
        given = config.get(name) or [0.0] * num_layers
        numbers = [0.0 if limit is None else limit for limit in given] if isinstance(given, list) else []
        if len(numbers) < num_layers or not all(isinstance(n, int | float) and n >= 0 for n in numbers):
            refuse(name, given, f"a list with the limit of each of {num_layers} layers")
        lists.append([float(limit) for limit in numbers[:num_layers]])
    pairs = tuple(zip(*lists, strict=True))
    return pairs if any(map(any, pairs)) else ()
