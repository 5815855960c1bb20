"""LatentForm: multi-head latent attention (MLA, arXiv 2405.04434) as a value, with its tensors and what it
computes.

The keys and values of all heads are products of one latent per token, and the cache keeps the latent. With
W_k and W_v as a head's rows of "kv_b", a score is q . (W_k latent) = (W_k^T q) . latent, and the weighted sum
of values is W_v times the weighted sum of latents. So no key and no value of a head is ever made: this is the
absorbed form. Both products are exact sums of integers, as all products with weights are (head_blocks.py).
The other part of a score comes from a few dimensions with rope, whose key all heads share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.kernels import BatchLayout, LayerKV
from penstock.kernels.head_blocks import HeadBlocks
from penstock.model.architecture import linear_tensors
from penstock.model.attention.chosen_keys import attend_to
from penstock.model.attention.indexer import Indexer
from penstock.model.config_values import count
from penstock.model.family import Family
from penstock.model.layers import OutputGate, QueryGrowth
from penstock.model.rope import score_factor
from penstock.spec import ModelSpec, RopeSpec
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec

#: Of the norms of latents, whatever the config says of the other norms.
LATENT_EPS = 1e-6


@dataclass(frozen=True)
class LatentForm:
    """The sizes of a head. The width of the latent is ModelSpec.latent_dim."""

    #: Dimensions of a query without rope and with rope, and of a value.
    plain_dim: int
    rope_dim: int
    value_dim: int
    #: Queries come from a latent of their own of this width; 0: from the hidden state.
    query_rank: int = 0
    has_bias: bool = False
    #: Of q after rope.
    growth: QueryGrowth | None = None
    out_gate: OutputGate | None = None
    #: What chooses keys. None: a token attends to all.
    indexer: Indexer | None = None

    @classmethod
    def of(cls, config: dict[str, Any], value_dim: int | None = None, has_bias: bool = False) -> LatentForm:
        """The sizes by their names in a config.json. `value_dim` serves where the config has none."""
        query_rank = count(config, "q_lora_rank") if config.get("q_lora_rank") is not None else 0
        return cls(
            count(config, "qk_nope_head_dim"),
            count(config, "qk_rope_head_dim"),
            count(config, "v_head_dim", default=value_dim),
            query_rank,
            has_bias,
        )

    @property
    def query_dim(self) -> int:
        return self.plain_dim + self.rope_dim

    def values(self, config: dict[str, Any], rope: RopeSpec | None) -> dict[str, Any]:
        """The fields of LlamaSpec in which a model with latents differs from Llama."""
        rank = count(config, "kv_lora_rank")
        return {
            "latent": self,
            "latent_dim": rank,
            "head_dim": rank + self.rope_dim,
            "num_kv_heads": 1,
            "rope": rope,
            "attention_scale": self.query_dim**-0.5 * (score_factor(rope) if rope else 1.0),
        }

    def tensors(self, spec: ModelSpec, prefix: str) -> tuple[TensorSpec, ...]:
        """The tensors of attend(), whose names in a checkpoint begin with `prefix`."""
        heads, hidden, rank = spec.num_heads, spec.hidden_size, spec.latent_dim
        kv_rows = heads * (self.plain_dim + self.value_dim)

        def matrix(name: str, part: str, rows: int, inputs: int, has_bias: bool) -> tuple[TensorSpec, ...]:
            return linear_tensors(name, (rows, inputs), (prefix + part,), has_bias)

        def norm(name: str, part: str, width: int) -> TensorSpec:
            return TensorSpec(name, (width,), (f"{prefix}{part}.weight",))

        if self.query_rank:
            queries = (
                *matrix("q_a", "q_a_proj", self.query_rank, hidden, self.has_bias),
                norm("q_a_norm", "q_a_layernorm", self.query_rank),
                *matrix("q", "q_b_proj", heads * self.query_dim, self.query_rank, False),
            )
        else:
            queries = matrix("q", "q_proj", heads * self.query_dim, hidden, False)
        return (
            *queries,
            *matrix("kv_a", "kv_a_proj_with_mqa", spec.head_dim, hidden, self.has_bias),
            norm("kv_a_norm", "kv_a_layernorm", rank),
            # Read as a block of rows for each head.
            *(replace(each, is_whole=True) for each in matrix("kv_b", "kv_b_proj", kv_rows, rank, False)),
            *(self.out_gate.tensors(prefix, spec) if self.out_gate else ()),
            *matrix("o", "o_proj", hidden, heads * self.value_dim, self.has_bias),
        )

    def attend(
        self,
        family: Family,
        index: int,
        weights: LayerWeights,
        x: Tensor,
        kv: LayerKV,
        batch: BatchLayout,
    ) -> Tensor:
        """Self-attention of normed x [num_tokens, hidden_size], with the output projection."""
        kernels, heads, rank = family.kernels, family.spec.num_heads, family.spec.latent_dim
        kv_b, border = weights.matrix("kv_b"), self.plain_dim
        (q, query_latent), row = self._query(family, weights, x), family.project(weights, "kv_a", x)
        latent = kernels.rms_norm(row[:, :rank], weights.vector("kv_a_norm"), LATENT_EPS)
        turned_q, turned_k = q[..., border:].contiguous(), row[:, None, rank:].contiguous()
        rope = family.ropes[index]
        if rope is not None:
            rope.turn(kernels, turned_q, batch)
            rope.turn(kernels, turned_k, batch)
        row = torch.cat((latent[:, None], turned_k), dim=-1)
        batch.write_kv(kernels, row, row, kv)
        absorbed = kernels.linear(q[..., :border].flatten(1), HeadBlocks(kv_b, heads, 0, border, True))
        q = torch.cat((absorbed.view(-1, heads, rank), turned_q), dim=-1)
        if self.growth is not None:
            q = self.growth.apply(q, batch.positions)
        spec = family.attentions[index]
        chosen = []
        if self.indexer is not None:
            chosen = self.indexer.choose(family, index, weights, x, query_latent, kv, batch)
        if chosen:
            dense = dict(enumerate(batch.query_start[1:].tolist())) | {
                each.seq: each.first for each in chosen
            }
            mixed = attend_to(kernels, q, kv, batch, chosen, spec, list(dense.values()))
        else:
            mixed = kernels.paged_attention(q, kv, batch, spec)
        values = kernels.linear(mixed, HeadBlocks(kv_b, heads, border, border + self.value_dim))
        if self.out_gate is not None:
            values = self.out_gate.apply(family, weights, x, values)
        return family.project(weights, "o", values)

    def _query(self, family: Family, weights: LayerWeights, x: Tensor) -> tuple[Tensor, Tensor]:
        """[num_tokens, num_heads, query_dim], and what that was made of: the latent, or x."""
        if self.query_rank:
            latent = family.project(weights, "q_a", x)
            x = family.kernels.rms_norm(latent, weights.vector("q_a_norm"), LATENT_EPS)
        return family.project(weights, "q", x).view(-1, family.spec.num_heads, self.query_dim), x
