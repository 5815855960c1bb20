"""ModelSpec: a model's config.json as numbers. This file knows shapes and bytes, no tensor and no file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

#: The stack of a model that has only one.
DECODER = "decoder"
#: The stacks of a model that encodes its input: the encoder, and the projections of the encoder's result to
#: keys and values for each layer of the decoder.
ENCODER, CROSS = "encoder", "cross"


class UnitKey(NamedTuple):
    """The name of a unit, the bytes of a model that are read at once: the dense unit of a layer (`expert` is
    None), or one expert of the layer. The lower planes of a layer's matrices are a dense unit of their
    own."""

    stack: str
    layer: int
    expert: int | None = None
    plane: Literal["lower"] | None = None


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) and its scaling."""

    theta: float = 10000.0
    #: How many of head_dim's dimensions are rotated.
    rotary_dim: int = 0
    #: Scaling as in config.json: "default", "linear", "dynamic", "llama3", "longrope", "yarn".
    scaling: str = "default"
    #: The scaling's own parameters, as config.json gives them.
    parameters: dict[str, object] = field(default_factory=dict)
    #: Two scalings ("longrope", "dynamic") have other frequencies for long sequences. short_length is the
    #: length of the longest sequence that is still a short one. 0: one set of frequencies serves all lengths.
    short_length: int = 0

    def frequency_length(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """The sequence length to which the frequencies of a sequence's computed tokens belong. 0 stands for
        all lengths up to `short_length`. When a sequence grows and its frequency length changes, its keys
        must be computed again: they were turned by the old frequencies.

        LongRoPE: `short_length` + 1 stands for all longer sequences. All tokens of a sequence have the same
        frequencies. So it is in transformers' Phi-3, which looks at the last position of a forward pass and
        computes all keys again when an answer crosses the border. (Llama in transformers keeps the old keys
        beside new ones. We follow Phi-3, so that the next token of an answer is that of a forward pass.)

        Dynamic NTK: the prompt's length, which never changes. transformers computes a prompt with the
        frequencies of the prompt's length. It computes each token of the answer with the frequencies of the
        length that the sequence has then, and keeps all keys. So the frequencies of a token at position p
        belong to the length max(p + 1, prompt length). Chunks, preemptions and company change no bit.
        """
        if self.scaling == "longrope":
            return self.short_length + 1 if num_tokens > self.short_length > 0 else 0
        return num_prompt_tokens if num_prompt_tokens > self.short_length > 0 else 0

    def table_bytes(self, max_model_len: int) -> int:
        """Bytes of the tables of cosines and sines for sequences of up to max_model_len tokens. A row has
        rotary_dim / 2 cosines and as many sines. LongRoPE has a table for short sequences, and a second one
        if there can be long sequences. Dynamic NTK keeps no table."""
        row_bytes, short = 4 * self.rotary_dim, self.short_length
        if self.scaling == "dynamic":
            return 0
        if 0 < short < max_model_len:
            return row_bytes * (short + max_model_len)
        return row_bytes * max_model_len


@dataclass(frozen=True)
class KVPart:
    """One tensor of a layer's keys and values: [num_blocks, *axes]."""

    name: str
    #: The name of the dtype in torch, and the bytes of an element.
    dtype: str
    item_bytes: int
    #: Each axis is "heads" (the KV heads), "head_dim", "tokens" (of a block; exactly one axis) or a number.
    axes: tuple[str | int, ...]

    def shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        sizes = {"heads": num_kv_heads, "head_dim": head_dim, "tokens": block_size}
        return num_blocks, *(axis if isinstance(axis, int) else sizes[axis] for axis in self.axes)


@dataclass(frozen=True)
class KVLayout:
    """The form of keys and values: the tensors that a layer keeps of each token. Kernels know a layout by its
    name; plan, cache and scheduler know its bytes and shapes."""

    name: str
    parts: tuple[KVPart, ...]

    def bytes_per_token(self, num_kv_heads: int, head_dim: int) -> int:
        """In one layer."""
        return sum(
            part.item_bytes * math.prod(part.shape(1, 1, num_kv_heads, head_dim)) for part in self.parts
        )


def _plain_layout(dtype: str, item_bytes: int) -> KVLayout:
    """Keys and values as numbers of one type. K has tokens last, since a vector load of the kernels takes 16
    keys."""
    k = KVPart("k", dtype, item_bytes, ("heads", "head_dim", "tokens"))
    v = KVPart("v", dtype, item_bytes, ("heads", "tokens", "head_dim"))
    return KVLayout(dtype, (k, v))


FLOAT16, FLOAT32 = _plain_layout("float16", 2), _plain_layout("float32", 4)
#: The layout of each choice of EngineConfig.kv_dtype.
KV_LAYOUTS: dict[str, KVLayout] = {layout.name: layout for layout in (FLOAT16, FLOAT32)}


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a model. Families add their own constants by subclassing."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    #: The head shares the embedding's matrix.
    is_tied: bool = False
    rope: RopeSpec | None = None
    #: How many experts of a layer a token passes through; 0 where layers have no experts.
    num_experts_per_token: int = 0
    #: Layers of the encoder that reads a prompt; the model then writes its answer with a decoder of
    #: num_layers layers. 0: the model is a decoder alone, and its prompt is the beginning of its text.
    num_encoder_layers: int = 0
    #: The tokens with which a decoder begins that writes an answer to an encoded prompt.
    decoder_start: tuple[int, ...] = ()
    #: Rows of the embedding, behind those of the vocabulary, that stand in front of every prompt.
    soft_prompt: tuple[int, ...] = ()
    #: Every token of a prompt sees the whole prompt. A step computes a prompt whole therefore.
    sees_prompt_both_ways: bool = False
    #: Tokens with which no answer begins.
    never_first: tuple[int, ...] = ()
    #: Per layer: the number of last tokens that a token attends to, itself included. 0: all tokens.
    sliding_windows: tuple[int, ...] = ()

    def kv_bytes_per_token(self, layout: KVLayout = FLOAT16) -> int:
        """Bytes of K and V of one token over all layers."""
        return self.num_layers * layout.bytes_per_token(self.num_kv_heads, self.head_dim)

    @property
    def has_encoder(self) -> bool:
        return self.num_encoder_layers > 0

    def sliding_window(self, layer_index: int) -> int:
        """The window of a layer in tokens; 0 is no window."""
        return self.sliding_windows[layer_index] if self.sliding_windows else 0


@dataclass(frozen=True)
class ExpertFootprint:
    """The experts of all layers, as the memory plan sees them. All have one size, the largest expert's."""

    num_bytes: int = 0
    #: Elements of an expert's matrices.
    elements: int = 0
    #: The number of experts in all layers together, and of those that one token passes through.
    count: int = 0
    count_per_token: int = 0


NO_EXPERTS = ExpertFootprint()


@dataclass(frozen=True)
class ModelFootprint:
    """A model as the memory plan sees it: the bytes of its weights, and the cost of a token."""

    #: Bytes of each dense unit, in the order of a sweep over all stacks. A layer has one dense unit, or a
    #: second one behind it, of lower planes.
    layer_bytes: tuple[int, ...]
    embedding_bytes: int
    #: Bytes of the head, without a matrix that it shares with the embedding.
    head_bytes: int
    kv_bytes_per_token: int
    #: Elements of all matrices: those of dense units, and those of the head.
    layer_elements: int
    head_elements: int
    max_position_embeddings: int
    #: The sizes of activations: hidden size, outputs of the widest matrix of a layer, vocabulary.
    hidden_size: int
    widest_layer: int
    vocab_size: int
    #: Bytes of the embedding's matrix, if the head shares it. A GPU needs a copy of these bytes, since the
    #: embedding lies on the host.
    shared_head_bytes: int = 0
    #: Rope's tables lie beside the weights.
    rope: RopeSpec | None = None
    experts: ExpertFootprint = NO_EXPERTS
    #: The first so many dense units are swept once for each request (Stack.is_encoder), the others in each
    #: step.
    num_encoder_layers: int = 0
    #: Elements of the matrices of those first units; layer_elements does not count them.
    encoder_elements: int = 0
    #: The dense units that are lower planes, by their places in layer_bytes.
    lower_planes: frozenset[int] = frozenset()

    @property
    def encoder_bytes(self) -> int:
        """Bytes of the layers that are swept once for each request."""
        return sum(self.layer_bytes[: self.num_encoder_layers])

    @property
    def decoder_bytes(self) -> int:
        """Bytes of the layers that each step sweeps, without experts."""
        return sum(self.layer_bytes[self.num_encoder_layers :])

    @property
    def num_layers(self) -> int:
        return len(self.layer_bytes) - len(self.lower_planes)

    @property
    def token_elements(self) -> int:
        """Elements of the matrices in all layers that one token passes through."""
        return self.layer_elements + self.experts.count_per_token * self.experts.elements
