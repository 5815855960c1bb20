"""GPT-2 (Radford et al., 2019) and two relatives. GPT (Radford et al., 2018) has its norms after the sums.
GPT-BigCode (StarCoder, arXiv 2305.06161) has one head of k and v for all heads of q."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.kernels import Kernels
from penstock.model.config_values import flag, require
from penstock.model.families.gpt.gpt import GPT
from penstock.model.families.gpt.gpt_architecture import GPT2_KEYS, GPTSpec, Names
from penstock.model.layers import GROUPED, PLAIN, activation_function
from penstock.spec import ModelSpec

#: Causal masks, which old checkpoints carry.
MASKS = r"\.attn\.(bias|masked_bias)$"


@dataclass(frozen=True)
class GPT2Spec(GPTSpec):
    """Configs differ in the scale of scores."""

    #: Scores of layer i are divided by i + 1 as well.
    has_layer_scales: bool = False


class GPT2(GPT):
    """Checkpoints store GPT-2's matrices as [in_features, out_features]."""

    architectures = ("GPT2LMHeadModel",)
    unused_tensors = (MASKS,)
    position_offset = 0
    is_transposed = True
    spec: GPT2Spec

    def __init__(
        self,
        spec: GPT2Spec,
        kernels: Kernels,
        max_model_len: int,
        device: torch.device | None = None,
        host_kernels: Kernels | None = None,
    ) -> None:
        super().__init__(spec, kernels, max_model_len, device, host_kernels)
        if spec.has_layer_scales:
            self.attentions = [
                replace(each, scale=each.scale / (index + 1)) for index, each in enumerate(self.attentions)
            ]

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> ModelSpec:
        require(config, "add_cross_attention", False)
        base = cls._spec(config, attention_scale=_scale(config))
        return GPT2Spec(**vars(base), has_layer_scales=flag(config, "scale_attn_by_inverse_layer_idx", False))


class GPTBigCode(GPT):
    """Files have q of all heads, then k, then v; without multi_query q, k and v of each head."""

    architectures = ("GPTBigCodeForCausalLM",)
    unused_tensors = (MASKS, r"^transformer\.bias$")
    position_offset = 0
    default_activation = "gelu_pytorch_tanh"

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> GPTSpec:
        require(config, "add_cross_attention", False)
        is_multi_query = flag(config, "multi_query", True)
        base = cls._spec(config, attention_scale=_scale(config))
        return replace(
            base,
            num_kv_heads=1 if is_multi_query else base.num_heads,
            attention=PLAIN if is_multi_query else GROUPED,
        )


class OpenAIGPT(GPT):
    """The "gelu" of its config.json is the approximation by tanh."""

    architectures = ("OpenAIGPTLMHeadModel",)
    unused_tensors = (MASKS, r"^transformer\.position_ids$")
    position_offset = 0
    is_transposed = True
    names = Names(embedding="transformer.tokens_embed", positions="transformer.positions_embed")
    keys = GPT2_KEYS._replace(activation="afn")
    default_activation = "gelu"

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> GPTSpec:
        base = cls._spec(config, is_post_norm=True, has_final_norm=False)
        is_gelu = base.activation == "gelu"
        return replace(
            base,
            activation=activation_function("gelu_new") if is_gelu else base.activation,
        )


def _scale(config: dict[str, Any]) -> float | None:
    """The attention_scale of GPTSpec."""
    return None if flag(config, "scale_attn_weights", True) else 1.0
