"""PooledFamily: a family whose head gives what is pooled in place of logits: hidden states, a score's number,
or the logits of two tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from penstock.model.family import Family
from penstock.model.pooling.pooling_spec import PoolingSpec
from penstock.spec import ModelSpec
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import ModelTensors, TensorSpec

#: Layers after the last one of a checkpoint that a pooled model may have no use for.
_HEADS = r"^(lm_head|score|classifier)\."
#: The layer for scores of models whose last token is scored.
_SCORE = "score"


class PooledFamily(Family):
    """Beside a family, as the first base of a class that pooled() makes."""

    pooling: ClassVar[PoolingSpec]

    @classmethod
    def model_tensors(cls, spec: ModelSpec) -> ModelTensors:
        if cls.pooling.score_tokens is not None:
            return super().model_tensors(spec)
        return ModelTensors(
            cls.embedding_tensors(spec),
            cls.stacks(spec),
            cls.head_tensors(spec),
            cls.optional_prefix,
            (*cls.unused_tensors, _HEADS),
            has_logits=False,
        )

    @classmethod
    def head_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        if cls.pooling.score_tokens is not None:
            return super().head_tensors(spec)
        # The head of a tied model has no matrix of its own.
        norms = super().head_tensors(replace(spec, is_tied=True))
        return norms + (_score_tensors(cls, spec) if cls.pooling.is_score else ())

    def kv_layer(self, stack: str, index: int) -> int:
        """An encoder's step computes whole texts, so that keys and values are needed only within a layer: all
        layers have the same place for them."""
        is_shared = self.spec.sees_prompt_both_ways and bool(self.spec.layers_without_kv)
        return 0 if is_shared else super().kv_layer(stack, index)

    def head(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        """What is pooled, of rows that are: float32 [num_rows, hidden_size]; for scores [num_rows, 1], or
        [num_rows, 2] where two tokens say them."""
        pooling = self.pooling
        if pooling.score_tokens is not None:
            return super().head(weights, hidden)[:, list(pooling.score_tokens)]
        rows = self.norm_final(weights, hidden)
        return torch.stack([self._score(weights, row) for row in rows]) if pooling.is_score else rows

    def _score(self, weights: LayerWeights, row: Tensor) -> Tensor:
        """float32 [1]. Each row is computed alone, so that it has the same bits in any company."""
        if (inner := weights.optional(f"{_SCORE}.inner")) is not None:
            row = torch.tanh(torch.addmv(weights.vector(f"{_SCORE}.inner.bias"), inner, row))
        score, bias = torch.mv(weights.vector(_SCORE), row), weights.optional(f"{_SCORE}.bias")
        return score if bias is None else score + bias


def pooled(family: type[Family], pooling: PoolingSpec) -> type[PooledFamily]:
    """The family, whose head gives what `pooling` needs."""
    return type(f"Pooled{family.__name__}", (PooledFamily, family), {"pooling": pooling})


def _score_tensors(family: type[Family], spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """The layers for scores in float32: they are small, and an error of theirs would be the score's."""
    if not family.score_parts:
        return (TensorSpec(_SCORE, (1, spec.hidden_size), (f"{_SCORE}.weight",)),)
    inner, outer = family.score_parts
    return (
        TensorSpec(f"{_SCORE}.inner", (spec.hidden_size, spec.hidden_size), (f"{inner}.weight",)),
        TensorSpec(f"{_SCORE}.inner.bias", (spec.hidden_size,), (f"{inner}.bias",)),
        TensorSpec(_SCORE, (1, spec.hidden_size), (f"{outer}.weight",)),
        TensorSpec(f"{_SCORE}.bias", (1,), (f"{outer}.bias",)),
    )
