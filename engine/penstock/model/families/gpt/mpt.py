"""MPT (MosaicML, 2023) has ALiBi, norms without biases, and no biases at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from penstock.kernels import AttentionSpec
from penstock.model.attention.alibi import alibi_slopes
from penstock.model.config_values import count, number, require
from penstock.model.families.gpt.gpt import GPT
from penstock.model.families.gpt.gpt_architecture import GPTSpec, Keys, Names
from penstock.model.layers import AttentionForm
from penstock.model.norms import Norm


@dataclass(frozen=True)
class MPTSpec(GPTSpec):
    """Configs differ in how steep ALiBi is."""

    #: transformers takes 8 whatever the config says; MPT's own code takes the config's value.
    alibi_bias_max: int = 8


class MPT(GPT):
    """Variants that transformers does not compute are refused."""

    architectures = ("MptForCausalLM", "MPTForCausalLM")
    names = Names(
        layers="transformer.blocks",
        input_norm="norm_1",
        qkv=("attn.Wqkv",),
        o="attn.out_proj",
        mlp_norm="norm_2",
        up=("ffn.up_proj",),
        down="ffn.down_proj",
        final_norm="transformer.norm_f",
    )
    keys = Keys(("d_model",), ("n_heads",), ("n_layers",), positions="max_seq_len", eps="layer_norm_epsilon")
    spec: MPTSpec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> MPTSpec:
        attention = (config.get("attn_config") or {}) | {"model_type": config.get("model_type")}
        require(config, "expansion_ratio", 4)
        require(config, "no_bias", True)
        require(config, "logit_scale", None)
        require(config, "ffn_config", None, {"ffn_type": "mptmlp"})
        require(config, "norm_type", "low_precision_layernorm", "layernorm")
        require(attention, "alibi", True)
        require(attention, "attn_type", "multihead_attention")
        require(attention, "sliding_window_size", -1)
        for name in ("qk_ln", "qk_gn", "prefix_lm", "rope"):
            require(attention, name, False)
        scale = attention.get("softmax_scale")
        base = cls._spec(
            config,
            activation="gelu",
            norm=Norm(is_centred=True),
            attention=AttentionForm(clip=number(attention, "clip_qkv", 0.0)),
            attention_scale=None if scale is None else number(attention, "softmax_scale"),
            has_qkv_bias=False,
            has_o_bias=False,
            has_mlp_bias=False,
        )
        bias_max = count(attention, "alibi_bias_max", default=8)
        own = {"intermediate_size": 4 * base.hidden_size, "biases_scores": True}
        return MPTSpec(**vars(base) | own, alibi_bias_max=bias_max)

    def attention_spec(self) -> AttentionSpec:
        slopes = alibi_slopes(self.spec.num_heads, self.spec.alibi_bias_max).to(self.device)
        return replace(super().attention_spec(), alibi_slopes=slopes)
