"""What a model's weights are: tensors, units that are read at once, stacks of layers. This file knows nothing
of files and memory; a tensor's WeightFormat knows how the tensor lies in bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from penstock.spec import DECODER, UnitKey
from penstock.weights.formats.stacked_format import in_one_format
from penstock.weights.formats.weight_format import FLOAT32, Component, WeightFormat


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a layer as the layer uses it, and the names of its parts in a checkpoint."""

    name: str
    #: A matrix is (out_features, in_features).
    shape: tuple[int, ...]
    #: Names in the checkpoint. Several parts are concatenated along the first axis, in this order.
    parts: tuple[str, ...]
    format: WeightFormat = FLOAT32
    #: The checkpoint stores [in_features, out_features] (GPT-2's Conv1D).
    is_transposed: bool = False
    #: Products that read the matrix in another way than by its output channels want it in one place.
    is_whole: bool = False

    @property
    def is_matrix(self) -> bool:
        return self.format.is_matrix

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def components(self) -> tuple[Component, ...]:
        return self.format.components(self.shape)

    @property
    def can_be_split(self) -> bool:
        """Whether each array has a row for each output channel, and products want a matrix that lies in one
        place no more than in two."""
        if self.is_whole or not self.format.can_be_split:
            return False
        return all(array.shape[:1] == self.shape[:1] for array in self.components)

    @property
    def row_bytes(self) -> int:
        """Bytes of an output channel, of a matrix that can be split."""
        return sum(array.num_bytes for array in self.components) // self.shape[0]


class TensorSlot(NamedTuple):
    """Where one tensor lies in a buffer."""

    tensor: TensorSpec
    components: tuple[Component, ...]
    #: Where each component begins, in bytes.
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
    """How tensors lie in one contiguous buffer, in memory as in a file. Components with wide elements (norms,
    biases, scales) come first, so that they are aligned; components of single bytes follow. Within each kind
    the order is that in which the layer uses the tensors. There are no gaps, since safetensors allows none.
    With the sizes that models have, matrices begin on cache lines; kernels do not rely on this."""

    slots: tuple[TensorSlot, ...]
    num_bytes: int
    #: The bytes that are in files. Arrays that are made of others follow them.
    num_stored_bytes: int

    @classmethod
    def of(cls, tensors: tuple[TensorSpec, ...]) -> UnitLayout:
        each = [(tensor, tensor.components) for tensor in tensors]
        offsets: dict[tuple[int, int], int] = {}
        end = 0
        for item_bytes in _item_sizes(tensors):
            for number, (_, components) in enumerate(each):
                for index, component in enumerate(components):
                    if component.item_bytes == item_bytes and not component.derive:
                        offsets[number, index] = end
                        end += component.num_bytes
        num_stored = end
        for number, (_, components) in enumerate(each):
            for index, component in enumerate(components):
                if component.derive:
                    offsets[number, index] = end
                    end += component.num_bytes
        slots = tuple(
            TensorSlot(tensor, components, tuple(offsets[number, index] for index in range(len(components))))
            for number, (tensor, components) in enumerate(each)
        )
        return cls(slots, end, num_stored)

    def derive(self, buffer: Tensor) -> None:
        """Make the arrays that are in no file. `buffer` holds all others."""
        for slot in self.slots:
            arrays = slot.arrays(buffer)
            for before, component, array in zip(arrays, slot.components[1:], arrays[1:], strict=False):
                if component.derive:
                    array.copy_(component.derive(before))


def _item_sizes(tensors: tuple[TensorSpec, ...]) -> list[int]:
    """Sizes of elements, widest first."""
    sizes = {component.item_bytes for tensor in tensors for component in tensor.components}
    return sorted(sizes, reverse=True)


def stored_arrays(tensors: tuple[TensorSpec, ...]) -> Iterator[StoredArray]:
    """The arrays of a unit in a checkpoint, in the order of UnitLayout. A file that holds the arrays in this
    order holds the buffer's stored bytes."""
    alone = [own for tensor in tensors for own in in_one_format(tensor)]
    for item_bytes in _item_sizes(tensors):
        for tensor in alone:
            for component in tensor.components:
                if component.item_bytes == item_bytes and not component.derive:
                    yield from (StoredArray(tensor, part, component) for part in tensor.parts)


@dataclass(frozen=True)
class Unit:
    """Tensors that are read at once: the dense tensors of a layer, the lower planes of its matrices where
    these lie apart, or one of its experts."""

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
    #: The tensors of each layer that every sweep needs.
    layers: tuple[tuple[TensorSpec, ...], ...]
    #: The tensors of each layer's experts; () if no layer has experts.
    experts: tuple[tuple[tuple[TensorSpec, ...], ...], ...] = ()
    #: The lower planes of each layer's matrices, where its other tensors have the upper ones; () if no layer
    #: has planes.
    lower_planes: tuple[tuple[TensorSpec, ...], ...] = ()
    #: The rest of each layer, where its other tensors are what a card keeps of it (split_rows()).
    rests: tuple[tuple[TensorSpec, ...], ...] = ()
    #: The stack is swept once for each request, when the request comes in; other stacks in each step. Encoder
    #: stacks come first in a model.
    is_encoder: bool = False
    #: The place in the model's stack of the first of these layers, where another machine has those before.
    first_layer: int = 0

    def units(self) -> Iterator[Unit]:
        """The dense unit of each layer, followed by the layer's lower planes and its experts."""
        for index, layer in enumerate(self.layers):
            place = self.first_layer + index
            yield Unit(UnitKey(self.name, place), layer)
            if self.lower_planes and self.lower_planes[index]:
                yield Unit(UnitKey(self.name, place, plane="lower"), self.lower_planes[index])
            if self.rests and self.rests[index]:
                yield Unit(UnitKey(self.name, place, plane="rest"), self.rests[index])
            for number, expert in enumerate(self.experts[index] if self.experts else ()):
                yield Unit(UnitKey(self.name, place, number), expert)

    def cut(self, first: int, stop: int) -> Stack:
        """The layers from `first` to `stop`, counted from 0, which keep their places."""
        return replace(
            self,
            layers=self.layers[first:stop],
            experts=self.experts[first:stop],
            lower_planes=self.lower_planes[first:stop],
            rests=self.rests[first:stop],
            first_layer=self.first_layer + first,
        )


@dataclass(frozen=True)
class ModelTensors:
    """What a model consists of, as its family declares it."""

    embedding: tuple[TensorSpec, ...]
    #: Stacks in the order in which they are swept.
    stacks: tuple[Stack, ...]
    head: tuple[TensorSpec, ...]
    #: Beginning of names, which checkpoints of the bare model (without a head) leave out.
    optional_prefix: str = ""
    #: Regular expressions of tensors that checkpoints may hold and the model does not need.
    unused: tuple[str, ...] = ()
    #: Rows of the embedding's matrix that make logits where the head shares the matrix. None: all rows.
    num_outputs: int | None = None
    #: The model makes logits. One that is made for vectors or scores has no matrix for them.
    has_logits: bool = True
    #: The head of multi-token prediction that the checkpoint holds, as a model of one layer. A model has its
    #: head here where it is converted, since a converted folder keeps the head; the code that computes the
    #: head opens it apart.
    mtp: ModelTensors | None = None

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Units of all stacks, in the order of a sweep."""
        return tuple(unit for stack in self.stacks for unit in stack.units())

    @property
    def groups(self) -> tuple[tuple[TensorSpec, ...], ...]:
        """Embedding, units, head: each is a file of a converted model. The same of a head of multi-token
        prediction, without the matrices that are the model's."""
        own = self.embedding, *(unit.tensors for unit in self.units), self.head
        if self.mtp is None:
            return own
        return *own, *map(beside_shared, self.mtp.groups)

    @property
    def layers(self) -> tuple[tuple[TensorSpec, ...], ...]:
        """The dense tensors of all layers, in the order of a sweep. Lower planes are not among them."""
        return tuple(layer for stack in self.stacks for layer in stack.layers)

    @property
    def places(self) -> tuple[int, ...]:
        """The places of the layers in the model, where some layers are another machine's; () where all are
        here."""
        if not any(stack.first_layer for stack in self.stacks):
            return ()
        return tuple(stack.first_layer + index for stack in self.stacks for index in range(len(stack.layers)))

    @property
    def num_encoder_layers(self) -> int:
        """Layers of the encoder stacks."""
        return sum(len(stack.layers) for stack in self.stacks if stack.is_encoder)

    @property
    def num_encoder_units(self) -> int:
        """Dense units of the encoder stacks."""
        encoders = {stack.name for stack in self.stacks if stack.is_encoder}
        return sum(unit.key.stack in encoders for unit in self.dense_units)

    @property
    def dense_units(self) -> tuple[Unit, ...]:
        """The units that a sweep needs in any case, in its order."""
        return tuple(unit for unit in self.units if unit.key.expert is None)

    @property
    def layer_bytes(self) -> int:
        """Bytes of the dense units of all layers."""
        return sum(unit.num_bytes for unit in self.dense_units)

    @cached_property
    def by_part(self) -> dict[str, TensorSpec]:
        """The tensor to which each tensor of a checkpoint belongs; a part of a stacked matrix is a tensor."""
        found: dict[str, TensorSpec] = {}
        for tensor in (tensor for group in self.groups for tensor in group):
            for own in in_one_format(tensor):
                for part in own.parts:
                    found.setdefault(part, own)  # a lower plane comes after the upper one
        return found

    @property
    def output_matrix(self) -> TensorSpec:
        """The matrix that makes logits: the head's own ("head"), or the embedding's if the two are tied."""
        named = {tensor.name: tensor for tensor in (*self.embedding, *self.head)}
        if "head" in named or self.num_outputs is None:
            return named.get("head") or named["embedding"]
        return replace(named["embedding"], shape=(self.num_outputs, *named["embedding"].shape[1:]))

    @property
    def is_tied(self) -> bool:
        """Whether the embedding's matrix serves as the head's."""
        return self.has_logits and self.output_matrix not in self.head

    @property
    def multiplied(self) -> tuple[TensorSpec, ...]:
        """The matrices by which tokens are multiplied: those of the units, and the one that makes logits."""
        inner = (tensor for unit in self.units for tensor in unit.tensors if tensor.is_matrix)
        return (*inner, self.output_matrix) if self.has_logits else tuple(inner)

    @property
    def group_size(self) -> int:
        """Inputs that share a scale in the units' matrices; 0 if all inputs of an output channel do."""
        return max((tensor.format.group_size for unit in self.units for tensor in unit.tensors), default=0)


def beside_shared(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The tensors of an embedding or a head without the matrix that a second model has, too."""
    return tuple(tensor for tensor in tensors if tensor.name not in ("embedding", "head"))


def decoder_only(layers: tuple[tuple[TensorSpec, ...], ...]) -> tuple[Stack, ...]:
    """The stacks of a model that has only a decoder."""
    return (Stack(DECODER, layers),)
