"""BERT (arXiv 1810.04805) and XLM-RoBERTa (arXiv 1911.02116): encoders whose hidden states are pooled. Every
token sees the whole text. Positions are learned, layer norms come after each part, and all matrices have
biases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.kernels import ActivationFunction, BatchLayout, LayerKV
from penstock.model.architecture import layer_norm_tensors, linear_tensors
from penstock.model.config_values import count, num_layers_of, number, require
from penstock.model.family import Family, GivenRows
from penstock.model.layers import activation_function, attend, layer_norm, mlp
from penstock.spec import ModelSpec
from penstock.weights.formats.weight_format import INT8
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec


@dataclass(frozen=True)
class BERTSpec(ModelSpec):
    """The constants in which members of the family differ."""

    activation: ActivationFunction = "gelu"
    #: Rows of the table of positions; those before `first_position` were used only for padding.
    num_positions: int = 0
    first_position: int = 0
    #: Rows of the table that tells the two texts of a pair.
    num_types: int = 2


class BERT(Family):
    architectures: ClassVar[tuple[str, ...]] = (
        "BertModel",
        "BertForSequenceClassification",
        "BertForMaskedLM",
    )
    optional_prefix = "bert."
    #: Layers that are for other purposes, and positions that older files hold.
    unused_tensors = (r"position_ids$", r"^(cls|lm_head|pooler|bert\.pooler|roberta\.pooler)\.")
    #: The modules of the layers that make scores of the first token: tanh stands after all but the last.
    score_parts = ("bert.pooler.dense", "classifier")
    spec: BERTSpec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> BERTSpec:
        hidden, num_heads = count(config, "hidden_size"), count(config, "num_attention_heads")
        require(config, "is_decoder", False, None)
        require(config, "position_embedding_type", "absolute", None)
        num_layers, first = num_layers_of(config, "num_hidden_layers"), cls._first_position(config)
        vocab_size, positions = count(config, "vocab_size"), count(config, "max_position_embeddings")
        num_types = count(config, "type_vocab_size", default=2)
        return BERTSpec(
            architecture=cls.architectures[0],
            hidden_size=hidden,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hidden // num_heads,
            intermediate_size=count(config, "intermediate_size"),
            vocab_size=vocab_size,
            max_position_embeddings=positions - first,
            norm_eps=number(config, "layer_norm_eps", 1e-12),
            is_tied=True,
            sees_prompt_both_ways=True,
            second_text_ids=vocab_size if num_types > 1 else 0,
            activation=activation_function(config.get("hidden_act", "gelu")),
            num_positions=positions,
            first_position=first,
            num_types=num_types,
        )

    @classmethod
    def _first_position(cls, config: dict[str, Any]) -> int:
        return 0

    @classmethod
    def embedding_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, BERTSpec)
        hidden, part = spec.hidden_size, f"{cls.optional_prefix}embeddings"
        rows, types = (spec.vocab_size, hidden), (spec.num_types, hidden)
        return (
            TensorSpec("embedding", rows, (f"{part}.word_embeddings.weight",), INT8),
            TensorSpec("positions", (spec.num_positions, hidden), (f"{part}.position_embeddings.weight",)),
            TensorSpec("types", types, (f"{part}.token_type_embeddings.weight",)),
            *layer_norm_tensors("first_norm", hidden, f"{part}.LayerNorm"),
        )

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        prefix, hidden, ffn = (
            f"{cls.optional_prefix}encoder.layer.{index}.",
            spec.hidden_size,
            spec.intermediate_size,
        )
        qkv = tuple(f"{prefix}attention.self.{part}" for part in ("query", "key", "value"))
        return (
            *linear_tensors("qkv", (3 * hidden, hidden), qkv),
            *linear_tensors("o", (hidden, hidden), (f"{prefix}attention.output.dense",)),
            *layer_norm_tensors("attention_norm", hidden, f"{prefix}attention.output.LayerNorm"),
            *linear_tensors("up", (ffn, hidden), (f"{prefix}intermediate.dense",)),
            *linear_tensors("down", (hidden, ffn), (f"{prefix}output.dense",)),
            *layer_norm_tensors("post_norm", hidden, f"{prefix}output.LayerNorm"),
        )

    @classmethod
    def head_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        return ()

    def embed(
        self, weights: LayerWeights, input_ids: Tensor, positions: Tensor, given: GivenRows | None = None
    ) -> Tensor:
        """The ids of a pair's second text have ModelSpec.second_text_ids added."""
        size = self.spec.vocab_size
        vectors = weights.matrix("embedding").look_up(input_ids % size)
        if given is not None:
            vectors[given.rows] = given.vectors
        vectors += weights.vector("types")[torch.div(input_ids, size, rounding_mode="floor")]
        vectors += weights.vector("positions")[positions + self.spec.first_position]
        norm, bias = weights.vector("first_norm"), weights.vector("first_norm.bias")
        return self.host_kernels.layer_norm(vectors, norm, bias, self.spec.norm_eps)

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        mixed = attend(self, index, weights, hidden, kv, batch)
        hidden = layer_norm(self, "attention_norm", weights, hidden + mixed)
        return layer_norm(
            self, "post_norm", weights, hidden + mlp(self, weights, hidden, self.spec.activation)
        )

    def norm_final(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        """The last layer ends with a norm."""
        return hidden


class RoBERTa(BERT):
    """Positions begin after the id of the padding token."""

    architectures = (
        *("XLMRobertaModel", "XLMRobertaForSequenceClassification", "XLMRobertaForMaskedLM"),
        *("RobertaModel", "RobertaForSequenceClassification", "RobertaForMaskedLM"),
    )
    optional_prefix = "roberta."
    score_parts = ("classifier.dense", "classifier.out_proj")

    @classmethod
    def _first_position(cls, config: dict[str, Any]) -> int:
        padding = config.get("pad_token_id", 1)
        return 1 + (padding if isinstance(padding, int) else 1)
