"""Falcon (arXiv 2311.16867): in the 7B model one head of k and v serves all heads of q; in the 40B, 180B and
11B models each group of heads has its own. Attention and mlp are parallel. Falcon-RW has ALiBi, and neither
groups nor anything in parallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.errors import UnsupportedModel
from penstock.kernels import BatchLayout, LayerKV
from penstock.model.attention.alibi import alibi_slopes
from penstock.model.config_values import count, flag, require
from penstock.model.families.gpt.gpt import GPT
from penstock.model.families.gpt.gpt_architecture import GPTSpec, Keys, Names
from penstock.model.layers import GROUPED
from penstock.model.rope import read_rope
from penstock.weights.layer_weights import LayerWeights


@dataclass(frozen=True)
class FalconSpec(GPTSpec):
    """Configs also differ in their positions."""

    #: ALiBi's bias is one more dimension of k, by which q has a 1: a head has one dimension more in the KV
    #: cache than its matrices have rows.
    has_alibi: bool = False

    @property
    def projected_head_dim(self) -> int:
        return self.head_dim - self.has_alibi


class Falcon(GPT):
    """Rows of q, k and v are those of the first KV head's group, then of the second, and so on."""

    architectures = ("FalconForCausalLM",)
    names = Names(
        embedding="transformer.word_embeddings",
        input_norm="input_layernorm",
        qkv=("self_attention.query_key_value",),
        o="self_attention.dense",
        mlp_norm="post_attention_layernorm",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    )
    keys = Keys(
        ("hidden_size", "n_embed"),
        ("num_attention_heads", "n_head"),
        ("num_hidden_layers", "n_layer"),
        ffn="ffn_hidden_size",
        eps="layer_norm_epsilon",
        activation="activation",
    )
    default_activation = "gelu"
    spec: FalconSpec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> FalconSpec:
        is_new, has_alibi = flag(config, "new_decoder_architecture", False), flag(config, "alibi", False)
        is_parallel, has_bias = flag(config, "parallel_attn", True), flag(config, "bias", False)
        require(config, "apply_residual_connection_post_layernorm", False)
        require(config, "num_ln_in_parallel_attn", None, 1, *((2,) if is_new else ()))
        if is_new:
            require(config, "parallel_attn", True)
        has_two_norms = is_new and config.get("num_ln_in_parallel_attn") != 1
        head_dim = count(config, *cls.keys.hidden) // count(config, *cls.keys.heads)
        num_kv_heads = _num_kv_heads(config, is_new, *cls.keys.heads)
        base = cls._spec(
            {"max_position_embeddings": 2048} | config,
            rope=None if has_alibi else read_rope(config, head_dim),
            num_kv_heads=num_kv_heads,
            attention=GROUPED,
            attention_scale=max(1, head_dim) ** -0.5,
            is_parallel=is_parallel,
            has_mlp_norm=has_two_norms or not is_parallel,
            has_qkv_bias=has_bias,
            has_o_bias=has_bias,
            has_mlp_bias=has_bias,
        )
        if not has_alibi:
            return FalconSpec(**vars(base))
        if num_kv_heads < base.num_heads:
            raise UnsupportedModel(
                f"config.json has alibi = True and {num_kv_heads} heads of k for {base.num_heads} of q; with "
                "alibi, Penstock computes only heads of q that each have their own k"
            )
        return FalconSpec(**vars(base) | {"head_dim": head_dim + 1}, has_alibi=True)

    @classmethod
    def names_of(cls, spec: GPTSpec) -> Names:
        has_two = spec.is_parallel and spec.has_mlp_norm
        return cls.names._replace(input_norm="ln_attn", mlp_norm="ln_mlp") if has_two else cls.names

    def attention(
        self, index: int, weights: LayerWeights, x: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        if not self.spec.has_alibi:
            return super().attention(index, weights, x, kv, batch)
        num_heads, head_dim = self.spec.num_heads, self.spec.projected_head_dim
        q, k, v = self.project(weights, "qkv", x).view(-1, num_heads, 3, head_dim).unbind(2)
        q, k, v = (
            pad(q, (0, 1), value=1.0),
            torch.cat((k, self._bias(batch.positions)), dim=-1),
            pad(v, (0, 1)),
        )
        batch.write_kv(self.kernels, k, v, kv)
        mixed = self.kernels.paged_attention(q, kv, batch, self.attentions[index])
        mixed = mixed.view(-1, num_heads, head_dim + 1)[..., :-1].flatten(1)
        return self.project(weights, "o", mixed)

    def _bias(self, positions: Tensor) -> Tensor:
        """ALiBi's bias of keys, float32 [num_tokens, num_heads, 1]. Falcon rounds slopes, positions and their
        products to bfloat16, and scales scores and biases together. float16 holds all these biases."""
        slopes = alibi_slopes(self.spec.num_heads).to(positions.device)
        return (slopes.bfloat16() * positions[:, None]).float().unsqueeze(-1)


def _num_kv_heads(config: dict[str, Any], is_new: bool, *heads: str) -> int:
    """Older models have one head of k and v, or as many as heads of q, whatever num_kv_heads says."""
    if is_new:
        return count(config, "num_kv_heads", *heads)
    return 1 if flag(config, "multi_query", True) else count(config, *heads)
