"""T5 (arXiv 1910.10683), T5 v1.1, mT5, Flan-T5, UL2, CPM-2 (arXiv 2106.10715): an encoder that sees its whole
input, and a decoder that also attends to the encoder's result. Positions are biases of attention by distance
and head.

EVA (arXiv 2108.01547, 2203.09313) is the same, but that EVA 2.0 scales scores by 1 / sqrt(head_dim), which T5
does not do at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.errors import UnsupportedModel
from penstock.kernels import ActivationFunction, AttentionSpec, BatchLayout, DistanceBias, LayerKV
from penstock.model.architecture import linear_tensors
from penstock.model.config_values import count, flag, num_layers_of, number
from penstock.model.family import Family, LayerFunction
from penstock.model.layers import activation_function, gated_mlp, mlp
from penstock.spec import CROSS, DECODER, ENCODER, ModelSpec
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import Stack, TensorSpec
from penstock.weights.weight_format import INT8

#: Positions are distances, and far ones share a bucket: no table ends. This many tokens of input and answer
#: together are allowed where nobody says how many.
MAX_TOKENS = 4096


@dataclass(frozen=True)
class T5Spec(ModelSpec):
    """The constants in which members of the family differ."""

    activation: ActivationFunction = "relu"
    is_gated: bool = False
    #: Scores are q . k times this.
    score_scale: float = 1.0
    #: The decoder's result is multiplied by this before the head.
    output_scale: float = 1.0
    num_buckets: int = 32
    max_distance: int = 128


class T5(Family):
    """rms_norm before each part, no biases, attention without a scale."""

    architectures: ClassVar[tuple[str, ...]] = ("T5ForConditionalGeneration",)
    optional_prefix = ""
    unused_tensors: ClassVar[tuple[str, ...]] = (
        r"^(encoder|decoder)\.embed_tokens\.weight$",
        r"EncDecAttention\.relative_attention_bias\.weight$",
    )
    spec: T5Spec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> T5Spec:
        projection = str(config.get("feed_forward_proj", "relu"))
        kind, _, name = projection.rpartition("-")
        if kind not in ("", "gated"):
            raise UnsupportedModel(f"feed_forward_proj is {projection!r}; it is a function or gated-function")
        num_heads, hidden = count(config, "num_heads"), count(config, "d_model")
        num_layers = num_layers_of(config, "num_layers")
        is_tied = config.get("tie_word_embeddings") is not False
        return T5Spec(
            architecture=cls.architectures[0],
            hidden_size=hidden,
            num_layers=count(config, "num_decoder_layers", default=num_layers),
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=count(config, "d_kv"),
            intermediate_size=count(config, "d_ff"),
            vocab_size=count(config, "vocab_size"),
            max_position_embeddings=MAX_TOKENS,
            norm_eps=number(config, "layer_norm_epsilon", 1e-6),
            is_tied=is_tied,
            num_encoder_layers=num_layers,
            decoder_start=cls.decoder_start(config),
            # transformers calls the usual "gelu" of a gated T5 "gelu_new".
            activation=activation_function("gelu_new" if projection == "gated-gelu" else name),
            is_gated=kind == "gated",
            score_scale=cls.score_scale(config),
            # T5 v1.0 ties its head and scales; v1.1 does neither. transformers 5 writes both into the config.
            output_scale=hidden**-0.5 if flag(config, "scale_decoder_outputs", is_tied) else 1.0,
            num_buckets=count(config, "relative_attention_num_buckets", default=32),
            max_distance=count(config, "relative_attention_max_distance", default=128),
        )

    @classmethod
    def decoder_start(cls, config: dict[str, Any]) -> tuple[int, ...]:
        """The tokens with which an answer begins; T5 begins with padding."""
        return (_token_id(config, "decoder_start_token_id", "pad_token_id", default=0),)

    @classmethod
    def score_scale(cls, config: dict[str, Any]) -> float:
        return 1.0

    @classmethod
    def embedding_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """Both biases lie here, because all layers of a stack share those of its first layer."""
        assert isinstance(spec, T5Spec)
        shape = spec.num_buckets, spec.num_heads
        bias = "{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        return (
            TensorSpec("embedding", (spec.vocab_size, spec.hidden_size), ("shared.weight",), INT8),
            *(TensorSpec(f"{name}_bias", shape, (bias.format(name),)) for name in (ENCODER, DECODER)),
        )

    @classmethod
    def stacks(cls, spec: ModelSpec) -> tuple[Stack, ...]:
        encoder = tuple(_encoder_tensors(spec, index) for index in range(spec.num_encoder_layers))
        cross = tuple(_cross_tensors(spec, index) for index in range(spec.num_layers))
        decoder = tuple(cls.layer_tensors(spec, index) for index in range(spec.num_layers))
        return (
            Stack(ENCODER, encoder, is_encoder=True),
            Stack(CROSS, cross, is_encoder=True),
            Stack(DECODER, decoder),
        )

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        """A layer of the decoder. The projections of the encoder's result are in the stack CROSS."""
        prefix, hidden, inner = (
            f"decoder.block.{index}.layer.",
            spec.hidden_size,
            spec.num_heads * spec.head_dim,
        )
        cross = f"{prefix}1.EncDecAttention."
        return (
            *_attention_tensors(spec, f"{prefix}0."),
            TensorSpec("cross_norm", (hidden,), (f"{prefix}1.layer_norm.weight",)),
            *linear_tensors("cross_q", (inner, hidden), (f"{cross}q",), has_bias=False),
            *linear_tensors("cross_o", (hidden, inner), (f"{cross}o",), has_bias=False),
            *_mlp_tensors(spec, f"{prefix}2."),
        )

    @classmethod
    def head_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        norm = TensorSpec("final_norm", (spec.hidden_size,), ("decoder.final_layer_norm.weight",))
        head = TensorSpec("head", (spec.vocab_size, spec.hidden_size), ("lm_head.weight",), INT8)
        return (norm,) if spec.is_tied else (norm, head)

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

    def layer_of(self, stack: str) -> LayerFunction:
        functions: dict[str, LayerFunction] = {ENCODER: self._encode, CROSS: self._project_input}
        return functions.get(stack, self.layer)

    def kv_layer(self, stack: str, index: int) -> int:
        """A layer of the encoder needs its keys and values only while it is computed: all of them use the
        places of the decoder's first layer, which the stack CROSS fills afterwards."""
        if stack == CROSS:
            return index - self.spec.num_encoder_layers
        return 0 if stack == ENCODER else index

    def _encode(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        hidden = self._attend(weights, hidden, kv, batch, ENCODER)
        hidden = self._mix(weights, hidden)
        final = weights.optional("final_norm")
        return hidden if final is None else self.kernels.rms_norm(hidden, final, self.spec.norm_eps)

    def _project_input(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        """Keys and values of the encoded input for one layer of the decoder; `hidden` goes on as it is."""
        heads = self.project(weights, "cross_kv", hidden).view(
            -1, 2 * self.spec.num_heads, self.spec.head_dim
        )
        k, v = heads.split_with_sizes((self.spec.num_heads, self.spec.num_heads), dim=1)
        self.kernels.write_kv(k, v, kv, batch.slot_mapping)
        return hidden

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        assert batch.cross is not None, "a decoder's step says where its encoded inputs lie"
        hidden = self._attend(weights, hidden, kv, batch, DECODER)
        x = self.kernels.rms_norm(hidden, weights.vector("cross_norm"), self.spec.norm_eps)
        q = self.project(weights, "cross_q", x).view(-1, self.spec.num_heads, self.spec.head_dim)
        mixed = self.kernels.paged_attention(q, kv, batch.cross, self.attentions[index])
        hidden = hidden + self.project(weights, "cross_o", mixed)
        return self._mix(weights, hidden)

    def _attend(
        self, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout, stack: str
    ) -> Tensor:
        x = self.kernels.rms_norm(hidden, weights.vector("input_norm"), self.spec.norm_eps)
        heads = self.project(weights, "qkv", x).view(-1, 3 * self.spec.num_heads, self.spec.head_dim)
        q, k, v = heads.split_with_sizes((self.spec.num_heads,) * 3, dim=1)
        self.kernels.write_kv(k, v, kv, batch.slot_mapping)
        mixed = self.kernels.paged_attention(q, kv, batch, self.biased[stack])
        return hidden + self.project(weights, "o", mixed)

    def _mix(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        x = self.kernels.rms_norm(hidden, weights.vector("post_norm"), self.spec.norm_eps)
        compute: Callable[..., Tensor] = gated_mlp if self.spec.is_gated else mlp
        return hidden + compute(self, weights, x, self.spec.activation)

    def norm_final(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        normed = self.kernels.rms_norm(hidden, weights.vector("final_norm"), self.spec.norm_eps)
        return normed if self.spec.output_scale == 1.0 else normed * self.spec.output_scale


class MT5(T5):
    """mT5 and CPM-2: the head is never scaled, whatever the config says of ties, as in transformers."""

    architectures = ("MT5ForConditionalGeneration",)

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> T5Spec:
        return super().read_spec(config | {"scale_decoder_outputs": False})


class EVA(T5):
    """EVA 1.0 and 2.0. An answer begins with `<s_0>`, which the config calls the token for begin."""

    architectures = ("EVAModel",)
    unused_tensors = (*T5.unused_tensors, r"^role_embeds\.weight$")

    @classmethod
    def decoder_start(cls, config: dict[str, Any]) -> tuple[int, ...]:
        return (_token_id(config, "decoder_start_token_id", "bos_token_id", default=29810),)

    @classmethod
    def score_scale(cls, config: dict[str, Any]) -> float:
        return count(config, "d_kv") ** -0.5 if flag(config, "attn_scale", False) else 1.0

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> T5Spec:
        # The config says "relu", and EVA's code computes a gated gelu whatever the config says. The head has
        # a matrix of its own, and nothing scales before it.
        own = {
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "scale_decoder_outputs": False,
        }
        return super().read_spec(config | own)


def _token_id(config: dict[str, Any], *names: str, default: int) -> int:
    """The first of these entries that is a token id."""
    found = (config.get(name) for name in names)
    return next((value for value in found if isinstance(value, int) and value >= 0), default)


def buckets(distance: Tensor, num_buckets: int, max_distance: int, sees_both_ways: bool) -> Tensor:
    """The bucket of each distance (key position - query position, int64), int64 of the same shape: T5's
    paper, section 2.1, with the rounding of its published code. Where a query sees keys behind it, half of
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


def _attention_tensors(spec: ModelSpec, prefix: str) -> tuple[TensorSpec, ...]:
    """Self-attention of encoder and decoder."""
    hidden, inner = spec.hidden_size, spec.num_heads * spec.head_dim
    qkv = tuple(f"{prefix}SelfAttention.{part}" for part in "qkv")
    return (
        TensorSpec("input_norm", (hidden,), (f"{prefix}layer_norm.weight",)),
        *linear_tensors("qkv", (3 * inner, hidden), qkv, has_bias=False),
        *linear_tensors("o", (hidden, inner), (f"{prefix}SelfAttention.o",), has_bias=False),
    )


def _mlp_tensors(spec: ModelSpec, prefix: str) -> tuple[TensorSpec, ...]:
    assert isinstance(spec, T5Spec)
    hidden, ffn, part = spec.hidden_size, spec.intermediate_size, f"{prefix}DenseReluDense."
    up = (
        linear_tensors("gate_up", (2 * ffn, hidden), (f"{part}wi_0", f"{part}wi_1"), has_bias=False)
        if spec.is_gated
        else linear_tensors("up", (ffn, hidden), (f"{part}wi",), has_bias=False)
    )
    return (
        TensorSpec("post_norm", (hidden,), (f"{prefix}layer_norm.weight",)),
        *up,
        *linear_tensors("down", (hidden, ffn), (f"{part}wo",), has_bias=False),
    )


def _encoder_tensors(spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
    """A layer of the encoder; the last layer also has the norm behind the encoder."""
    prefix = f"encoder.block.{index}.layer."
    layer = (*_attention_tensors(spec, f"{prefix}0."), *_mlp_tensors(spec, f"{prefix}1."))
    if index < spec.num_encoder_layers - 1:
        return layer
    return (*layer, TensorSpec("final_norm", (spec.hidden_size,), ("encoder.final_layer_norm.weight",)))


def _cross_tensors(spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
    """What makes the encoded input's keys and values for a layer of the decoder. These matrices work once for
    each request, and the decoder's layers, which are read for each token, do not hold them."""
    inner, prefix = spec.num_heads * spec.head_dim, f"decoder.block.{index}.layer.1.EncDecAttention."
    return linear_tensors(
        "cross_kv", (2 * inner, spec.hidden_size), (f"{prefix}k", f"{prefix}v"), has_bias=False
    )
