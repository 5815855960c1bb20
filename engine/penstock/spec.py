"""ModelSpec: a model's config.json as numbers. This file knows shapes and bytes, no tensor and no file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple

from penstock.errors import ConfigError
from penstock.goes_with import REFUSALS, Feature
from penstock.state_layout import NO_STATE, StateLayout

#: The stack of a model that has only one.
DECODER = "decoder"
#: The stacks of a model that encodes its input: the encoder, and the projections of the encoder's result to
#: keys and values for each layer of the decoder.
ENCODER, CROSS = "encoder", "cross"


class UnitKey(NamedTuple):
    """The name of a unit, the bytes of a model that are read at once: the dense unit of a layer (`expert` is
    None), or one expert of the layer. The lower planes of a layer's matrices are a dense unit of their
    own, and so is the rest of a layer of which a card keeps a part."""

    stack: str
    layer: int
    expert: int | None = None
    plane: Literal["lower", "rest"] | None = None


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
    #: The pairs that are rotated are the dimensions (2i, 2i + 1); otherwise (i, i + rotary_dim / 2).
    is_interleaved: bool = False

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


#: Bytes of a scale of INT8 keys and values: a bfloat16.
SCALE_BYTES = 2


@dataclass(frozen=True)
class KVPart:
    """One tensor of a layer's keys and values: [num_blocks, *axes]."""

    name: str
    #: The name of the dtype in torch, and the bytes of an element.
    dtype: str
    item_bytes: int
    #: Each axis is "heads" (the KV heads), "head_dim", "scaled_dim" (head_dim, and SCALE_BYTES more),
    #: "tokens" (of a block; exactly one axis) or a number.
    axes: tuple[str | int, ...]

    def shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        sizes = {"heads": num_kv_heads, "head_dim": head_dim, "tokens": block_size}
        sizes["scaled_dim"] = head_dim + SCALE_BYTES
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
#: Integers, and a scale for each head of each token (kernels/int8_kv.py). A head's codes lie in a block as
#: the numbers of the plain layouts do, and its scales of the block's tokens lie right after them, so that
#: attention reads memory as one stream.
INT8 = KVLayout(
    "int8",
    (
        KVPart("k", "int8", 1, ("heads", "scaled_dim", "tokens")),
        KVPart("v", "int8", 1, ("heads", "scaled_dim", "tokens")),
    ),
)


def _latent_layout(dtype: str, item_bytes: int) -> KVLayout:
    """One row per token, from which the keys and the values of all heads follow: a latent, and after it the
    part of a key that rope has turned (MLA, arXiv 2405.04434). The row is the key of the one KV head, and its
    first ModelSpec.latent_dim numbers are the value. Tokens lie last, as in K of the plain layouts."""
    return KVLayout(
        f"latent {dtype}", (KVPart("latent", dtype, item_bytes, ("heads", "head_dim", "tokens")),)
    )


def _with_sides(layout: KVLayout, widths: tuple[int, ...]) -> KVLayout:
    """A layout with rows of these widths as further parts. Kernels of attention read the others alone."""
    item = layout.parts[0]
    sides = (KVPart("side", item.dtype, item.item_bytes, (width, "tokens")) for width in widths)
    return replace(layout, parts=(*layout.parts, *sides))


LATENT_FLOAT16, LATENT_FLOAT32 = _latent_layout("float16", 2), _latent_layout("float32", 4)
#: The layout of each choice of EngineConfig.kv_dtype, and that of models that cache a latent.
KV_LAYOUTS: dict[str, KVLayout] = {"float16": FLOAT16, "float32": FLOAT32, "int8": INT8}
LATENT_LAYOUTS: dict[str, KVLayout] = {"float16": LATENT_FLOAT16, "float32": LATENT_FLOAT32}


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a model. Families add their own constants by subclassing."""

    #: Whose code computes the layers, as in EngineConfig.model_impl.
    implementation: ClassVar[str] = "penstock"

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
    #: Rows of the embedding, after those of the vocabulary, that stand in front of every prompt.
    soft_prompt: tuple[int, ...] = ()
    #: Every token of a prompt sees the whole prompt. A step computes a prompt whole therefore.
    sees_prompt_both_ways: bool = False
    #: What is added to the ids of a pair's second text, so that the embedding can tell the two texts. 0: it
    #: does not.
    second_text_ids: int = 0
    #: Tokens with which no answer begins.
    never_first: tuple[int, ...] = ()
    #: Per layer: the number of last tokens that a token attends to, itself included. 0: all tokens.
    sliding_windows: tuple[int, ...] = ()
    #: Per layer: tokens are cut into chunks of so many, and a token attends to its own chunk alone. 0: to
    #: all tokens.
    attention_chunks: tuple[int, ...] = ()
    #: Above 0, a token's keys and values are one row, whose first latent_dim numbers are the value. Then
    #: head_dim is the width of the row, and num_kv_heads is 1.
    latent_dim: int = 0
    #: The widths of further rows of a token beside its latent: what an indexer chooses by, or entries that
    #: stand for several tokens.
    side_dims: tuple[int, ...] = ()
    #: Above 0: a token attends to so many keys at most, of its own choice.
    num_chosen_keys: int = 0
    #: Layers whose tokens attend to the keys that another layer has chosen.
    layers_without_choice: frozenset[int] = frozenset()
    #: Scores have terms of distances (ALiBi, DistanceBias) beside q . k.
    biases_scores: bool = False
    #: Per layer, where layers differ: the number of its KV heads and the width of a head. () if all layers
    #: have num_kv_heads and head_dim.
    kv_shapes: tuple[tuple[int, int], ...] = ()
    #: Per layer, where layers differ: the number of its query heads, of which num_heads is the largest.
    head_counts: tuple[int, ...] = ()
    #: Per layer, where layers differ: its rope, or None. () if all layers have `rope`. Only the frequencies
    #: of `rope` may depend on a sequence's length.
    layer_ropes: tuple[RopeSpec | None, ...] = ()
    #: Per layer: the recurrent state of a sequence. () if no layer has one.
    states: tuple[StateLayout, ...] = ()
    #: Layers without keys and values of their own: layers without attention, and those that read the keys and
    #: values of another layer (Family.kv_layer).
    layers_without_kv: frozenset[int] = frozenset()

    def kv_layout(self, kv_dtype: str) -> KVLayout:
        """The layout of a choice of EngineConfig.kv_dtype. Raises ConfigError if there is none."""
        layouts = LATENT_LAYOUTS if self.latent_dim else KV_LAYOUTS
        if kv_dtype not in layouts:
            pair = (Feature.KV_INT8, Feature.LATENT)
            raise ConfigError(REFUSALS[pair].sentence(pair, self.architecture))
        return _with_sides(layouts[kv_dtype], self.side_dims) if self.side_dims else layouts[kv_dtype]

    def kv_bytes_per_token(self, layout: KVLayout | None = None) -> int:
        """Bytes of K and V of one token over all layers; without a layout, in float16."""
        layout = layout or self.kv_layout("float16")
        layers = set(range(self.num_layers)) - self.layers_without_kv
        return sum(layout.bytes_per_token(*self.kv_shape(index)) for index in layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's recurrent states over all layers; 0 for a model without."""
        return sum(layout.num_bytes for layout in self.states)

    @property
    def guess_bytes(self) -> int:
        """Bytes of what a guess brings to the recurrent states of all layers, which is kept until it was
        replayed or was wrong."""
        return sum(layout.guess_bytes for layout in self.states)

    @property
    def path_bytes(self) -> int:
        """Bytes of the largest state of one layer: a path of guesses goes on from a copy."""
        return max((layout.num_bytes for layout in self.states), default=0)

    def state_layout(self, layer_index: int) -> StateLayout:
        """The recurrent state of a layer."""
        return self.states[layer_index] if self.states else NO_STATE

    @property
    def embedding_size(self) -> int:
        """Numbers of a row of the embedding, and of a vector in place of a token."""
        return self.hidden_size

    @property
    def row_size(self) -> int:
        """Numbers of a token's row that the first layer gets. Those beyond hidden_size are inputs of single
        layers, and each layer leaves its own out of the row that it gives to the next."""
        return self.hidden_size

    def kv_shape(self, layer_index: int) -> tuple[int, int]:
        """The KV heads of a layer, and the width of a head."""
        return self.kv_shapes[layer_index] if self.kv_shapes else (self.num_kv_heads, self.head_dim)

    @property
    def has_encoder(self) -> bool:
        return self.num_encoder_layers > 0

    @property
    def features(self) -> frozenset[Feature]:
        """What the model is, as far as not everything goes with it."""
        kinds = {
            Feature.RECURRENT: bool(self.state_bytes),
            Feature.ENCODER: self.has_encoder,
            Feature.BOTH_WAYS: self.sees_prompt_both_ways,
            Feature.SOFT_PROMPT: bool(self.soft_prompt),
            Feature.EXPERTS: bool(self.num_experts_per_token),
            Feature.LATENT: bool(self.latent_dim),
            Feature.UNEVEN_KV: bool(self.kv_shapes),
            # Layers with a recurrent state have no keys and values to read.
            Feature.SHARED_KV: bool(self.layers_without_kv) and not self.state_bytes,
            Feature.SHARED_CHOICE: bool(self.layers_without_choice),
            Feature.LAYER_INPUTS: self.row_size > self.hidden_size,
            Feature.FOREIGN: self.implementation != "penstock",
        }
        return frozenset(feature for feature, is_so in kinds.items() if is_so)

    def sliding_window(self, layer_index: int) -> int:
        """The window of a layer in tokens; 0 is no window."""
        return self.sliding_windows[layer_index] if self.sliding_windows else 0

    def attention_chunk(self, layer_index: int) -> int:
        """The chunk of a layer in tokens; 0: the layer's attention is not chunked."""
        return self.attention_chunks[layer_index] if self.attention_chunks else 0

    def rope_of(self, layer_index: int) -> RopeSpec | None:
        """The rope of a layer."""
        return self.layer_ropes[layer_index] if self.layer_ropes else self.rope

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """All ropes that differ. Each has tables of its own."""
        different: list[RopeSpec] = []
        for rope in (self.rope, *self.layer_ropes):
            if rope is not None and rope not in different:
                different.append(rope)
        return tuple(different)


@dataclass(frozen=True)
class ExpertFootprint:
    """The experts of all layers, as the memory plan sees them. All have one size, the largest expert's."""

    num_bytes: int = 0
    #: Elements of an expert's matrices.
    elements: int = 0
    #: The number of experts in all layers together, and of those that one token passes through.
    count: int = 0
    count_per_token: int = 0
    #: The experts of one layer.
    per_layer: int = 1
    #: Elements of an expert's matrices by their formats (priced_formats.py); (): not known.
    formats: tuple[tuple[str, int], ...] = ()
    #: The popularity of a layer's experts as it was learned, the most popular first; (): as it usually is.
    weights: tuple[float, ...] = ()


NO_EXPERTS = ExpertFootprint()


class SharedMatrix(NamedTuple):
    """A matrix whose product a card and the processor can share."""

    out_features: int
    #: Bytes of an output channel, and those of its lower plane; 0: the matrix is not in planes.
    row_bytes: int
    lower_bytes: int = 0


@dataclass(frozen=True)
class ModelFootprint:
    """A model as the memory plan sees it: the bytes of its weights, and the cost of a token."""

    #: Bytes of each dense unit, in the order of a sweep over all stacks. A layer has one dense unit, or a
    #: second one after it, of lower planes.
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
    #: The tables of these ropes lie beside the weights.
    ropes: tuple[RopeSpec, ...] = ()
    experts: ExpertFootprint = NO_EXPERTS
    #: The first so many dense units are swept once for each request (Stack.is_encoder), the others in each
    #: step.
    num_encoder_layers: int = 0
    #: The last so many of these units are no layers of the encoder, but the projections that make keys and
    #: values of the encoded input for the decoder's cross-attention (the stack CROSS).
    num_cross_units: int = 0
    #: Elements of the matrices of those first units; layer_elements does not count them.
    encoder_elements: int = 0
    #: The dense units that are lower planes, by their places in layer_bytes.
    lower_planes: frozenset[int] = frozenset()
    #: The matrices of each layer whose products a card and the processor can share. (): the model has none.
    matrices: tuple[tuple[SharedMatrix, ...], ...] = ()
    #: Each layer is two units: what a card keeps of it, and the rest. The rests are the `lower_planes`.
    is_split: bool = False
    #: Elements of the matrices of dense units, without those of an encoder, and of the head, by their formats
    #: (priced_formats.py); (): not known.
    formats: tuple[tuple[str, int], ...] = ()
    head_formats: tuple[tuple[str, int], ...] = ()
    #: ModelSpec.implementation
    implementation: str = "penstock"
    #: ModelSpec.state_bytes, guess_bytes, path_bytes
    state_bytes: int = 0
    guess_bytes: int = 0
    path_bytes: int = 0
    #: Bytes of a token in each part of one layer's keys and values.
    kv_part_bytes: tuple[int, ...] = ()
    #: ModelSpec.features
    features: frozenset[Feature] = frozenset()
    #: Query heads of a layer and their width, if the processor can attend to keys and values in RAM beside a
    #: card; None: the card alone computes such attention.
    attended_heads: tuple[int, int] | None = None

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
