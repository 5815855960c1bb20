"""The files of T5, mT5, CPM-2 and EVA: config.json as numbers, and the tensors of both stacks. t5.py computes
with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from penstock.errors import UnsupportedModel
from penstock.kernels import ActivationFunction
from penstock.model.architecture import Architecture, linear_tensors
from penstock.model.config_values import count, flag, num_layers_of, number
from penstock.model.layers import activation_function
from penstock.spec import CROSS, DECODER, ENCODER, ModelSpec
from penstock.weights.formats.weight_format import INT8
from penstock.weights.tensors import Stack, TensorSpec

#: Positions are distances, and far ones share a bucket: no table ends. This many tokens of input and answer
#: together are allowed. Published models were trained with inputs of 512 to 2048 tokens, and an encoder takes
#: memory for all tokens of an input at once.
MAX_TOKENS = 2048


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


class T5Architecture(Architecture):
    """Two stacks, and between them the projections that make the encoded prompt's keys and values."""

    architectures: ClassVar[tuple[str, ...]] = ("T5ForConditionalGeneration",)
    optional_prefix = ""
    unused_tensors: ClassVar[tuple[str, ...]] = (
        r"^(encoder|decoder)\.embed_tokens\.weight$",
        r"EncDecAttention\.relative_attention_bias\.weight$",
    )

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
            biases_scores=True,
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
        return (token_id(config, "decoder_start_token_id", "pad_token_id", default=0),)

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


def token_id(config: dict[str, Any], *names: str, default: int) -> int:
    """The first of these entries that is a token id."""
    found = (config.get(name) for name in names)
    return next((value for value in found if isinstance(value, int) and value >= 0), default)


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
    """A layer of the encoder; the last layer also has the norm after the encoder."""
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
