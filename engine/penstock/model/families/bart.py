"""BART (arXiv 1910.13461): an encoder that sees its whole input, and a decoder that also attends to the
encoder's result. Each stack has learned positions that begin at 2. Layer norms come after each part, and a
first one after the embedding. All matrices have biases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from penstock.kernels import ActivationFunction, BatchLayout, LayerKV
from penstock.memory.planning.planner import ENCODER_ROWS
from penstock.model.architecture import layer_norm_tensors, linear_tensors
from penstock.model.config_values import count, flag, num_layers_of, require
from penstock.model.encoder_decoder import EncoderDecoder
from penstock.model.layers import activation_function, attend, layer_norm, mlp
from penstock.spec import CROSS, DECODER, ENCODER, ModelSpec
from penstock.weights.formats.weight_format import INT8
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import ModelTensors, Stack, TensorSpec

#: The tables of positions begin with two rows that were used only for padding.
POSITION_OFFSET = 2


@dataclass(frozen=True)
class BARTSpec(ModelSpec):
    """The constants in which members of the family differ."""

    activation: ActivationFunction = "gelu"
    encoder_intermediate_size: int = 0
    #: Rows of the embedding are multiplied by this.
    embedding_scale: float = 1.0


class BART(EncoderDecoder):
    architectures = ("BartForConditionalGeneration",)
    unused_tensors = (r"(encoder|decoder)\.version$",)
    spec: BARTSpec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> BARTSpec:
        hidden, num_heads = count(config, "d_model"), count(config, "decoder_attention_heads")
        require(config, "encoder_attention_heads", num_heads)
        begins = (config.get("decoder_start_token_id", 2), config.get("forced_bos_token_id"))
        return BARTSpec(
            architecture=cls.architectures[0],
            hidden_size=hidden,
            num_layers=num_layers_of(config, "decoder_layers"),
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hidden // num_heads,
            intermediate_size=count(config, "decoder_ffn_dim"),
            vocab_size=count(config, "vocab_size"),
            max_position_embeddings=count(config, "max_position_embeddings"),
            norm_eps=1e-5,
            is_tied=flag(config, "tie_word_embeddings", True),
            num_encoder_layers=num_layers_of(config, "encoder_layers"),
            decoder_start=tuple(begin for begin in begins if isinstance(begin, int)),
            activation=activation_function(config.get("activation_function", "gelu")),
            encoder_intermediate_size=count(config, "encoder_ffn_dim"),
            embedding_scale=hidden**0.5 if flag(config, "scale_embedding", False) else 1.0,
        )

    @classmethod
    def embedding_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        return (TensorSpec("embedding", (spec.vocab_size, spec.hidden_size), ("model.shared.weight",), INT8),)

    @classmethod
    def stacks(cls, spec: ModelSpec) -> tuple[Stack, ...]:
        assert isinstance(spec, BARTSpec)
        ffn = spec.encoder_intermediate_size
        encoder = tuple(_stack_tensors(spec, ENCODER, index, ffn) for index in range(spec.num_encoder_layers))
        cross = tuple(_cross_tensors(spec, index) for index in range(spec.num_layers))
        decoder = tuple(cls.layer_tensors(spec, index) for index in range(spec.num_layers))
        return (
            Stack(ENCODER, encoder, is_encoder=True),
            Stack(CROSS, cross, is_encoder=True),
            Stack(DECODER, decoder),
        )

    @classmethod
    def model_tensors(cls, spec: ModelSpec) -> ModelTensors:
        """Encoder and decoder have the embedding's matrix again if all are tied. A model that is not tied has
        a matrix for each of them, and is refused: one matrix more than is expected."""
        tensors = super().model_tensors(spec)
        copies = (r"(encoder|decoder)\.embed_tokens\.weight$",) if spec.is_tied else ()
        return replace(tensors, unused=(*tensors.unused, *copies))

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        """A layer of the decoder. The projections of the encoder's result are in the stack CROSS."""
        square, part = (spec.hidden_size, spec.hidden_size), f"model.decoder.layers.{index}.encoder_attn"
        return (
            *_stack_tensors(spec, DECODER, index, spec.intermediate_size),
            *linear_tensors("cross_q", square, (f"{part}.q_proj",)),
            *linear_tensors("cross_o", square, (f"{part}.out_proj",)),
            *layer_norm_tensors("cross_norm", spec.hidden_size, f"{part}_layer_norm"),
        )

    @classmethod
    def head_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        bias = TensorSpec("head.bias", (1, spec.vocab_size), ("final_logits_bias",))
        head = TensorSpec("head", (spec.vocab_size, spec.hidden_size), ("lm_head.weight",), INT8)
        return (bias,) if spec.is_tied else (bias, head)

    def scale_tokens(self, vectors: Tensor) -> Tensor:
        return vectors if self.spec.embedding_scale == 1.0 else vectors * self.spec.embedding_scale

    def encode(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        hidden = self._attend(weights, hidden, kv, batch)
        return _mix(self, weights, hidden)

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        hidden = self._attend(weights, hidden, kv, batch)
        mixed = self.attend_input(index, weights, hidden, kv, batch)
        return _mix(self, weights, layer_norm(self, "cross_norm", weights, hidden + mixed))

    def _attend(self, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout) -> Tensor:
        """The first layer of a stack adds positions to embedded tokens. Other layers have no table."""
        if (table := weights.optional("positions")) is not None:
            placed = hidden + table[batch.positions + POSITION_OFFSET]
            hidden = layer_norm(self, "first_norm", weights, placed)
        mixed = attend(self, 0, weights, hidden, kv, batch)  # attention is the same in all layers
        return layer_norm(self, "attention_norm", weights, hidden + mixed)

    def norm_final(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        """The last layer ends with a norm."""
        return hidden

    def head(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        return self.kernels.linear(hidden, weights.matrix("head"), weights.vector("head.bias")[0])


def _mix(family: BART, weights: LayerWeights, hidden: Tensor) -> Tensor:
    """Changes `hidden`, which is the result of a norm and nobody else's. An encoder gets its whole input at
    once, and inner vectors are several times as wide as others."""
    for first in range(0, len(hidden), ENCODER_ROWS):
        rows = hidden[first : first + ENCODER_ROWS]
        some = weights.for_rows(first, first + len(rows))
        rows += mlp(family, some, rows, family.spec.activation)
    return layer_norm(family, "post_norm", weights, hidden)


def _stack_tensors(spec: ModelSpec, stack: str, index: int, ffn: int) -> tuple[TensorSpec, ...]:
    """What a layer of either stack has. The first layer also has the stack's positions."""
    prefix, hidden = f"model.{stack}.layers.{index}.", spec.hidden_size
    qkv = tuple(f"{prefix}self_attn.{part}_proj" for part in "qkv")
    layer = (
        *linear_tensors("qkv", (3 * hidden, hidden), qkv),
        *linear_tensors("o", (hidden, hidden), (f"{prefix}self_attn.out_proj",)),
        *layer_norm_tensors("attention_norm", hidden, f"{prefix}self_attn_layer_norm"),
        *linear_tensors("up", (ffn, hidden), (f"{prefix}fc1",)),
        *linear_tensors("down", (hidden, ffn), (f"{prefix}fc2",)),
        *layer_norm_tensors("post_norm", hidden, f"{prefix}final_layer_norm"),
    )
    if index:
        return layer
    shape = spec.max_position_embeddings + POSITION_OFFSET, hidden
    return (
        TensorSpec("positions", shape, (f"model.{stack}.embed_positions.weight",)),
        *layer_norm_tensors("first_norm", hidden, f"model.{stack}.layernorm_embedding"),
        *layer,
    )


def _cross_tensors(spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
    """What makes the encoded input's keys and values for a layer of the decoder."""
    part = f"model.decoder.layers.{index}.encoder_attn."
    shape = 2 * spec.hidden_size, spec.hidden_size
    return linear_tensors("cross_kv", shape, (f"{part}k_proj", f"{part}v_proj"))
