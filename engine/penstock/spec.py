"""ModelSpec: a model's config.json as numbers. Knows shapes and bytes; knows no tensor and no file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

TensorKind = Literal["int8", "float32"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a layer as the layer uses it, and where a checkpoint keeps its parts.

    An "int8" tensor has shape (out_features, in_features) and brings float32 scales, one per output
    channel or per group of its inputs; "float32" tensors (norms, biases) are kept as they are.
    """

    name: str
    shape: tuple[int, ...]
    #: Names in the checkpoint; more than one are concatenated along the first axis, in this order.
    parts: tuple[str, ...]
    kind: TensorKind = "float32"
    #: The checkpoint stores [in_features, out_features] (GPT-2's Conv1D).
    is_transposed: bool = False
    #: Of an "int8" tensor: inputs that share a scale; 0 is all of an output channel's.
    group_size: int = 0

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """(out_features,) or (out_features, num_groups)."""
        rows = self.shape[:1]
        return rows + (self.shape[1] // self.group_size,) if self.group_size else rows


@dataclass(frozen=True)
class TensorSlot:
    """Where one tensor of a layer lies in the layer's buffer."""

    tensor: TensorSpec
    offset: int
    #: Offset of the scales of an int8 tensor; -1 otherwise.
    scale_offset: int


@dataclass(frozen=True)
class LayerLayout:
    """How a layer's tensors lie in one contiguous buffer, in memory as in a file: first everything that is
    float32 (norms, biases, scales), so that it is aligned, then the INT8 matrices; each in the order in
    which the layer uses them, without gaps, which safetensors does not allow. With the sizes that models
    have, matrices begin on cache lines; kernels need not rely on it."""

    slots: tuple[TensorSlot, ...]
    num_bytes: int

    @classmethod
    def of(cls, tensors: tuple[TensorSpec, ...]) -> LayerLayout:
        float_end, floats = 0, []
        for tensor in tensors:
            floats.append(float_end)
            float_end += 4 * math.prod(tensor.scale_shape if tensor.kind == "int8" else tensor.shape)
        slots, end = [], float_end
        for tensor, offset in zip(tensors, floats, strict=True):
            if tensor.kind == "int8":
                slots.append(TensorSlot(tensor, end, offset))
                end += tensor.num_elements
            else:
                slots.append(TensorSlot(tensor, offset, -1))
        return cls(tuple(slots), end)


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


@dataclass(frozen=True)
class KVPart:
    """One tensor of a layer's keys and values: [num_blocks, *axes]."""

    name: str
    #: As torch calls it, and bytes of an element.
    dtype: str
    item_bytes: int
    #: "heads" (of K and V), "head_dim", or a size of its own; "tokens" of a block comes once.
    axes: tuple[str | int, ...]

    def shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        sizes = {"heads": num_kv_heads, "head_dim": head_dim, "tokens": block_size}
        return num_blocks, *(axis if isinstance(axis, int) else sizes[axis] for axis in self.axes)


@dataclass(frozen=True)
class KVLayout:
    """What a token's keys and values are: the tensors that a layer keeps of them. Kernels know a layout by
    its name; plan, cache and scheduler know bytes and shapes."""

    name: str
    parts: tuple[KVPart, ...]

    def bytes_per_token(self, num_kv_heads: int, head_dim: int) -> int:
        """In one layer."""
        return sum(
            part.item_bytes * math.prod(part.shape(1, 1, num_kv_heads, head_dim)) for part in self.parts
        )


def _plain_layout(dtype: str, item_bytes: int) -> KVLayout:
    """Keys and values as numbers of one type. A vector load holds 16 keys."""
    k = KVPart("k", dtype, item_bytes, ("heads", "head_dim", "tokens"))
    v = KVPart("v", dtype, item_bytes, ("heads", "tokens", "head_dim"))
    return KVLayout(dtype, (k, v))


FLOAT16, FLOAT32 = _plain_layout("float16", 2), _plain_layout("float32", 4)
#: What EngineConfig.kv_dtype comes to.
KV_LAYOUTS: dict[str, KVLayout] = {layout.name: layout for layout in (FLOAT16, FLOAT32)}


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a decoder-only model. Families add their own constants by subclassing."""

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
    #: Per layer: how many last tokens a token attends to, itself included; 0 is all of them.
    sliding_windows: tuple[int, ...] = ()

    def kv_bytes_per_token(self, layout: KVLayout = FLOAT16) -> int:
        """Bytes of K and V of one token over all layers."""
        return self.num_layers * layout.bytes_per_token(self.num_kv_heads, self.head_dim)

    def sliding_window(self, layer_index: int) -> int:
        """The window of a layer in tokens; 0 is no window."""
        return self.sliding_windows[layer_index] if self.sliding_windows else 0


@dataclass(frozen=True)
class ModelFootprint:
    """A model as the memory plan sees it: bytes of INT8 weights, and what a token costs."""

    layer_bytes: tuple[int, ...]
    embedding_bytes: int
    #: Without what it shares with the embedding.
    head_bytes: int
    kv_bytes_per_token: int
    #: Elements of all matrices that a token passes through in the layers, and in the head.
    layer_elements: int
    head_elements: int
    max_position_embeddings: int
    #: What activations are made of: hidden size, outputs of the widest matrix of a layer, vocabulary.
    hidden_size: int
    widest_layer: int
    vocab_size: int
    #: Of the embedding's bytes, those that the head shares: where the two lie apart, they lie twice.
    shared_head_bytes: int = 0
    #: Of rope's tables, for each position.
    rope_bytes_per_token: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.layer_bytes)
