"""What a model's weights are: tensors, units that are read at once, stacks of layers. Knows no file and no
memory; how a tensor lies in bytes is its WeightFormat's business."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from penstock.spec import DECODER, UnitKey
from penstock.weights.weight_format import FLOAT32, Component, Int8, WeightFormat


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a layer as the layer uses it, and where a checkpoint keeps its parts."""

    name: str
    #: A matrix is (out_features, in_features).
    shape: tuple[int, ...]
    #: Names in the checkpoint; more than one are concatenated along the first axis, in this order.
    parts: tuple[str, ...]
    format: WeightFormat = FLOAT32
    #: The checkpoint stores [in_features, out_features] (GPT-2's Conv1D).
    is_transposed: bool = False

    @property
    def is_matrix(self) -> bool:
        return self.format.is_matrix

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def components(self) -> tuple[Component, ...]:
        return self.format.components(self.shape)


class TensorSlot(NamedTuple):
    """Where one tensor lies in a buffer."""

    tensor: TensorSpec
    components: tuple[Component, ...]
    #: Of each component, in bytes.
    offsets: tuple[int, ...]

    def arrays(self, buffer: Tensor) -> list[Tensor]:
        """Views of the components in a unit's buffer (uint8)."""
        return [
            component.view(buffer[offset : offset + component.num_bytes])
            for component, offset in zip(self.components, self.offsets, strict=True)
        ]


class StoredArray(NamedTuple):
    """One array of a checkpoint file: a component of one part of a tensor."""

    tensor: TensorSpec
    part: str
    component: Component

    @property
    def name(self) -> str:
        return self.part + self.component.suffix


@dataclass(frozen=True)
class UnitLayout:
    """How tensors lie in one contiguous buffer, in memory as in a file: components of wide elements first
    (norms, biases, scales), so that they are aligned, then those of single bytes; each in the order in which
    the layer uses them, without gaps, which safetensors does not allow. With the sizes that models have,
    matrices begin on cache lines; kernels need not rely on it."""

    slots: tuple[TensorSlot, ...]
    num_bytes: int

    @classmethod
    def of(cls, tensors: tuple[TensorSpec, ...]) -> UnitLayout:
        each = [(tensor, tensor.components) for tensor in tensors]
        offsets: dict[tuple[int, int], int] = {}
        end = 0
        for item_bytes in _item_sizes(tensors):
            for number, (_, components) in enumerate(each):
                for index, component in enumerate(components):
                    if component.item_bytes == item_bytes:
                        offsets[number, index] = end
                        end += component.num_bytes
        slots = tuple(
            TensorSlot(tensor, components, tuple(offsets[number, index] for index in range(len(components))))
            for number, (tensor, components) in enumerate(each)
        )
        return cls(slots, end)


def _item_sizes(tensors: tuple[TensorSpec, ...]) -> list[int]:
    """Sizes of elements, widest first."""
    sizes = {component.item_bytes for tensor in tensors for component in tensor.components}
    return sorted(sizes, reverse=True)


def stored_arrays(tensors: tuple[TensorSpec, ...]) -> Iterator[StoredArray]:
    """The arrays of a unit in a checkpoint, in the order in which UnitLayout has them: a file that holds them
    so holds the buffer."""
    for item_bytes in _item_sizes(tensors):
        for tensor in tensors:
            for component in tensor.components:
                if component.item_bytes == item_bytes:
                    yield from (StoredArray(tensor, part, component) for part in tensor.parts)


@dataclass(frozen=True)
class Unit:
    """Tensors that are read at once: a layer's own, or one expert of it."""

    key: UnitKey
    tensors: tuple[TensorSpec, ...]

    @cached_property
    def layout(self) -> UnitLayout:
        return UnitLayout.of(self.tensors)

    @property
    def num_bytes(self) -> int:
        return self.layout.num_bytes


@dataclass(frozen=True)
class Stack:
    """Layers that a sweep goes through in order."""

    name: str
    #: Of each layer: the tensors that every sweep needs.
    layers: tuple[tuple[TensorSpec, ...], ...]
    #: Of each layer: its experts' tensors; () if no layer has experts.
    experts: tuple[tuple[tuple[TensorSpec, ...], ...], ...] = ()

    def units(self) -> Iterator[Unit]:
        """Of each layer its dense unit, then its experts."""
        for index, layer in enumerate(self.layers):
            yield Unit(UnitKey(self.name, index), layer)
            for number, expert in enumerate(self.experts[index] if self.experts else ()):
                yield Unit(UnitKey(self.name, index, number), expert)


@dataclass(frozen=True)
class ModelTensors:
    """What a model consists of, as its family declares it."""

    embedding: tuple[TensorSpec, ...]
    #: In the order in which they are swept.
    stacks: tuple[Stack, ...]
    head: tuple[TensorSpec, ...]
    #: Prefix of the names that checkpoints of the bare model (without a head) leave out.
    optional_prefix: str = ""
    #: Regular expressions of tensors that checkpoints may hold and the model does not need.
    unused: tuple[str, ...] = ()

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Of all stacks, in the order of a sweep."""
        return tuple(unit for stack in self.stacks for unit in stack.units())

    @property
    def groups(self) -> tuple[tuple[TensorSpec, ...], ...]:
        """Embedding, units, head: each is a file of a converted model."""
        return (self.embedding, *(unit.tensors for unit in self.units), self.head)

    @property
    def layers(self) -> tuple[tuple[TensorSpec, ...], ...]:
        """The dense tensors of all layers, in the order of a sweep."""
        return tuple(layer for stack in self.stacks for layer in stack.layers)

    @property
    def is_tied(self) -> bool:
        """Whether the embedding's matrix serves as the head's."""
        return all(tensor.name != "head" for tensor in self.head)

    @property
    def output_matrix(self) -> TensorSpec:
        """The matrix that makes logits: the head's, or the embedding's if they are tied."""
        named = {tensor.name: tensor for tensor in (*self.embedding, *self.head)}
        return named.get("head") or named["embedding"]

    @property
    def group_size(self) -> int:
        """Of the units' matrices."""
        return max((tensor.format.group_size for unit in self.units for tensor in unit.tensors), default=0)

    def grouped(self, group_size: int) -> ModelTensors:
        """With INT8 scales per group in units and head; embeddings are looked up row by row and keep one
        scale for each row. Raises ConfigError if inputs don't make whole groups."""

        def group(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
            return tuple(
                replace(tensor, format=tensor.format.grouped(tensor, group_size))
                if isinstance(tensor.format, Int8)
                else tensor
                for tensor in tensors
            )

        stacks = tuple(
            Stack(
                stack.name,
                tuple(map(group, stack.layers)),
                tuple(tuple(map(group, experts)) for experts in stack.experts),
            )
            for stack in self.stacks
        )
        return replace(self, stacks=stacks, head=group(self.head))


def decoder_only(layers: tuple[tuple[TensorSpec, ...], ...]) -> tuple[Stack, ...]:
    """The stacks of a model that has one."""
    return (Stack(DECODER, layers),)
