"""T5 (arXiv 1910.10683), T5 v1.1, mT5, Flan-T5, UL2, CPM-2 (arXiv 2106.10715): an encoder that sees its whole
input, and a decoder that also attends to the encoder's result. Positions are biases of attention by distance
and head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.kernels import AttentionSpec, BatchLayout, DistanceBias, LayerKV
from penstock.memory.planning.planner import ENCODER_ROWS
from penstock.model.encoder_decoder import EncoderDecoder
from penstock.model.families.t5_architecture import T5Architecture, T5Spec
from penstock.model.layers import gated_mlp, mlp
from penstock.spec import DECODER, ENCODER
from penstock.weights.layer_weights import LayerWeights


class T5(T5Architecture, EncoderDecoder):
    """rms_norm before each part, no biases, attention without a scale."""

    spec: T5Spec

    def attention_spec(self) -> AttentionSpec:
        return AttentionSpec(self.spec.num_heads, self.spec.score_scale)

    def share(self, embedding: LayerWeights) -> None:
        plain = self.attention_spec()
        #: What attention computes in the layers of each stack.
        self.biased = {
            name: replace(plain, distance_bias=self._bias(embedding.vector(f"{name}_bias"), name == ENCODER))
            for name in (ENCODER, DECODER)
        }

    def _bias(self, table: Tensor, sees_both_ways: bool) -> DistanceBias:
        most = self.spec.max_distance
        distance = torch.arange(-most, most + 1)
        index = buckets(distance, self.spec.num_buckets, most, sees_both_ways)
        return DistanceBias(table.float()[index].t().contiguous().to(self.device))

    def encode(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        hidden = self._attend(weights, hidden, kv, batch, ENCODER)
        hidden = self._mix(weights, hidden)
        final = weights.optional("final_norm")
        return hidden if final is None else self.kernels.rms_norm(hidden, final, self.spec.norm_eps)

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        hidden = self._attend(weights, hidden, kv, batch, DECODER)
        x = self.kernels.rms_norm(hidden, weights.vector("cross_norm"), self.spec.norm_eps)
        hidden = hidden + self.attend_input(index, weights, x, kv, batch)
        return self._mix(weights, hidden)

    def _attend(
        self, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout, stack: str
    ) -> Tensor:
        x = self.kernels.rms_norm(hidden, weights.vector("input_norm"), self.spec.norm_eps)
        heads = self.project(weights, "qkv", x).view(-1, 3 * self.spec.num_heads, self.spec.head_dim)
        q, k, v = heads.split_with_sizes((self.spec.num_heads,) * 3, dim=1)
        batch.write_kv(self.kernels, k, v, kv)
        mixed = self.kernels.paged_attention(q, kv, batch, self.biased[stack])
        return hidden + self.project(weights, "o", mixed)

    def _mix(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        """Changes `hidden`, and returns it."""
        x = self.kernels.rms_norm(hidden, weights.vector("post_norm"), self.spec.norm_eps)
        compute: Callable[..., Tensor] = gated_mlp if self.spec.is_gated else mlp
        for first in range(0, len(x), ENCODER_ROWS):
            # An encoder gets its whole input at once, and inner vectors are several times as wide as others.
            rows = x[first : first + ENCODER_ROWS]
            some = weights.for_rows(first, first + len(rows))
            hidden[first : first + len(rows)] += compute(self, some, rows, self.spec.activation)
        return hidden

    def norm_final(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        normed = self.kernels.rms_norm(hidden, weights.vector("final_norm"), self.spec.norm_eps)
        return normed if self.spec.output_scale == 1.0 else normed * self.spec.output_scale


class MT5(T5):
    """mT5 and CPM-2: the head is never scaled, whatever the config says of ties, as in transformers."""

    architectures = ("MT5ForConditionalGeneration",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> T5Spec:
        return super().read_spec(config | {"scale_decoder_outputs": False})


def buckets(distance: Tensor, num_buckets: int, max_distance: int, sees_both_ways: bool) -> Tensor:
    """The bucket of each distance (key position - query position, int64), int64 of the same shape: T5's
    paper, section 2.1, with the rounding of its published code. Where a query sees keys after it, half of
    the buckets are for those. Half of what is left are for single distances, and the others grow up to
    max_distance."""
    first = torch.zeros_like(distance)
    if sees_both_ways:
        num_buckets //= 2
        first = torch.where(distance > 0, num_buckets, 0)
        distance = distance.abs()
    else:
        distance = (-distance).clamp_min(0)
    num_single = num_buckets // 2
    growth = torch.log(distance.clamp_min(1).float() / num_single) / math.log(max_distance / num_single)
    grown = num_single + (growth * (num_buckets - num_single)).long()
    return first + torch.where(distance < num_single, distance, grown.clamp_max(num_buckets - 1))
