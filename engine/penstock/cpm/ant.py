"""CPM-Ant (OpenBMB's CPM-Live, 10B): a decoder whose prompt is seen both ways. A soft prompt, rows of the
embedding that are no tokens, stands in front of every prompt. Positions are biases of attention by distance
and head, and another bias stands between soft prompt and text. Layers of compressed models may lack their
attention or their mlp."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import InvalidConfig, UnsupportedModel
from penstock.kernels import BatchLayout, DistanceBias, LayerKV
from penstock.model.architecture import linear_tensors
from penstock.model.config_values import count, flag, num_layers_of, number
from penstock.model.families.t5 import buckets
from penstock.model.family import Family
from penstock.model.layers import attend, gated_mlp
from penstock.spec import ModelSpec
from penstock.weights.formats.weight_format import INT8
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensors import TensorSpec

#: The kind of soft prompt, and the segments of soft prompt and text, with which CPM-Live generates text.
PROMPT_TYPE, SOFT_SEGMENT, TEXT_SEGMENT = 2, 0, 2
#: The vocabulary's tokens for a line end and for the end. CPM-Live never begins an answer with them.
LINE_END, END = 4, 7
#: CPM-Ant's usual lengths. No table of positions ends, since all far distances share a bucket.
MAX_TOKENS = 2048


class LayerParts(NamedTuple):
    """What a layer consists of. A layer without any part is no layer here."""

    #: The layer's number in the names of its tensors.
    number: int
    has_attention: bool
    has_mlp: bool


@dataclass(frozen=True)
class CPMAntSpec(ModelSpec):
    num_embeddings: int = 0
    num_segments: int = 32
    num_buckets: int = 512
    max_distance: int = 2048
    #: For each layer.
    parts: tuple[LayerParts, ...] = ()


class CPMAnt(Family):
    """rms_norm before attention and mlp, gated with gelu, no biases."""

    architectures = ("CpmAntForCausalLM",)
    optional_prefix = "cpmant."
    spec: CPMAntSpec

    @classmethod
    def read_spec(cls, config: dict[str, Any]) -> CPMAntSpec:
        vocab_size, num_heads = count(config, "vocab_size"), count(config, "num_attention_heads")
        types = count(config, "prompt_types", default=32)
        length = count(config, "prompt_length", default=32, most=MAX_TOKENS)
        num_segments = count(config, "segment_types", default=32)
        if types <= PROMPT_TYPE or num_segments <= TEXT_SEGMENT:
            raise UnsupportedModel(
                f"config.json has prompt_types = {types} and segment_types = {num_segments}; CPM-Ant writes "
                f"text with soft prompt {PROMPT_TYPE} and segment {TEXT_SEGMENT}, counted from 0"
            )
        first = vocab_size + PROMPT_TYPE * length
        parts = _parts(config)
        return CPMAntSpec(
            architecture=cls.architectures[0],
            hidden_size=count(config, "hidden_size"),
            num_layers=len(parts),
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=count(config, "dim_head"),
            intermediate_size=count(config, "dim_ff"),
            vocab_size=vocab_size,
            max_position_embeddings=MAX_TOKENS,
            norm_eps=number(config, "eps", 1e-6),
            is_tied=flag(config, "tie_word_embeddings", True),
            soft_prompt=tuple(range(first, first + length)),
            sees_prompt_both_ways=True,
            biases_scores=True,
            never_first=tuple(token for token in (LINE_END, END) if token < vocab_size),
            num_embeddings=vocab_size + types * length,
            num_segments=num_segments,
            num_buckets=count(config, "position_bias_num_buckets", default=512),
            max_distance=count(config, "position_bias_max_distance", default=2048),
            parts=parts,
        )

    @classmethod
    def embedding_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """The table of biases lies here, because all layers share it: a row for each bucket of distances,
        then one for each pair of segments."""
        assert isinstance(spec, CPMAntSpec)
        num_biases = spec.num_buckets + spec.num_segments**2
        rows, segments = (spec.num_embeddings, spec.hidden_size), (spec.num_segments, spec.hidden_size)
        bias = "cpmant.position_bias.relative_attention_bias"
        return (
            TensorSpec("embedding", rows, ("cpmant.input_embedding.weight",), INT8),
            TensorSpec("segments", segments, ("cpmant.segment_embedding.weight",)),
            TensorSpec("biases", (num_biases, spec.num_heads), (bias,)),
        )

    @classmethod
    def layer_tensors(cls, spec: ModelSpec, index: int) -> tuple[TensorSpec, ...]:
        assert isinstance(spec, CPMAntSpec)
        parts = spec.parts[index]
        prefix, hidden = f"cpmant.encoder.layers.{parts.number}.", spec.hidden_size
        inner, ffn = spec.num_heads * spec.head_dim, spec.intermediate_size
        attention, mlp = f"{prefix}self_att.", f"{prefix}ffn."
        qkv = tuple(f"{attention}self_attention.project_{part}" for part in "qkv")
        o, down = (f"{attention}self_attention.attention_out",), (f"{mlp}ffn.w_out",)
        gate_up = tuple(f"{mlp}ffn.w_in.w_{part}" for part in (0, 1))
        attention_tensors = (
            TensorSpec("input_norm", (hidden,), (f"{attention}layernorm_before_attention.weight",)),
            *linear_tensors("qkv", (3 * inner, hidden), qkv, has_bias=False),
            *linear_tensors("o", (hidden, inner), o, has_bias=False),
        )
        mlp_tensors = (
            TensorSpec("post_norm", (hidden,), (f"{mlp}layernorm_before_ffn.weight",)),
            *linear_tensors("gate_up", (2 * ffn, hidden), gate_up, has_bias=False),
            *linear_tensors("down", (hidden, ffn), down, has_bias=False),
        )
        return (attention_tensors if parts.has_attention else ()) + (mlp_tensors if parts.has_mlp else ())

    @classmethod
    def head_tensors(cls, spec: ModelSpec) -> tuple[TensorSpec, ...]:
        """The head's rows are the embedding's first ones, as published."""
        norm = TensorSpec("final_norm", (spec.hidden_size,), ("cpmant.encoder.output_layernorm.weight",))
        head = TensorSpec("head", (spec.vocab_size, spec.hidden_size), ("lm_head.weight",), INT8)
        return (norm,) if spec.is_tied else (norm, head)

    def share(self, embedding: LayerWeights) -> None:
        table, most, num_buckets = embedding.vector("biases"), self.spec.max_distance, self.spec.num_buckets
        index = buckets(torch.arange(-most, most + 1), num_buckets, most, sees_both_ways=True)
        soft, text, num_segments = SOFT_SEGMENT, TEXT_SEGMENT, self.spec.num_segments
        pairs = torch.tensor([soft * num_segments + text, text * num_segments + soft])
        bias = DistanceBias(
            table[index].t().contiguous().to(self.device),
            len(self.spec.soft_prompt),
            table[num_buckets + pairs].contiguous().to(self.device),
        )
        self.attentions = [replace(each, distance_bias=bias) for each in self.attentions]

    def place(self, weights: LayerWeights, vectors: Tensor, positions: Tensor) -> Tensor:
        is_text = positions >= len(self.spec.soft_prompt)
        return vectors + weights.vector("segments")[torch.where(is_text, TEXT_SEGMENT, SOFT_SEGMENT)]

    def layer(
        self, index: int, weights: LayerWeights, hidden: Tensor, kv: LayerKV, batch: BatchLayout
    ) -> Tensor:
        if "qkv" in weights:
            x = self.kernels.rms_norm(hidden, weights.vector("input_norm"), self.spec.norm_eps)
            hidden = hidden + attend(self, index, weights, x, kv, batch)
        if "down" not in weights:
            return hidden
        x = self.kernels.rms_norm(hidden, weights.vector("post_norm"), self.spec.norm_eps)
        return hidden + gated_mlp(self, weights, x, "gelu")

    def norm_final(self, weights: LayerWeights, hidden: Tensor) -> Tensor:
        return self.kernels.rms_norm(hidden, weights.vector("final_norm"), self.spec.norm_eps)


def _parts(config: dict[str, Any]) -> tuple[LayerParts, ...]:
    """The layers that have any part, by the key of CPM-Live's compressed models. Raises InvalidConfig."""
    num_layers, pairs = num_layers_of(config, "num_hidden_layers"), config.get("mask_modules")
    if pairs is None:
        pairs = [[False, False]] * num_layers
    if not (isinstance(pairs, list) and len(pairs) == num_layers and all(map(_is_pair, pairs))):
        raise InvalidConfig(
            f"config.json: mask_modules has to be a list of {num_layers} pairs of true or false, one for "
            "each layer: whether it lacks its attention, and whether it lacks its mlp"
        )
    parts = (LayerParts(number, not lacks[0], not lacks[1]) for number, lacks in enumerate(pairs))
    found = tuple(each for each in parts if each.has_attention or each.has_mlp)
    if not found:
        raise InvalidConfig("config.json: mask_modules leaves no layer")
    return found


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(each, bool) for each in value)
