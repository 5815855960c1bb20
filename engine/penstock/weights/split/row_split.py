"""A model whose layers are two units each: what a card keeps, and the rest. Kept are all vectors, the first
output channels of each matrix that can be split, and whole the other matrices; the rest are the other
channels. Output channels are rows of each array, so that a share of a matrix is the beginning of each of its
arrays. Experts, and an encoder's layers, are units as before.

A layer in planes is these two units as well, with the rows of both planes in each. Where upper planes guess,
the card keeps all of them, beside the first channels' lower planes: the rest is the same, and the link brings
lower planes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from penstock.kernels import PlanesTensor
from penstock.memory.planning.product_split import part_rows
from penstock.weights.tensors import ModelTensors, Stack, TensorSpec, Unit, UnitLayout


class Piece(NamedTuple):
    """Bytes of a unit's buffer."""

    offset: int
    num_bytes: int


def _is_upper_plane(matrix: TensorSpec) -> bool:
    return PlanesTensor in matrix.format.operand_types


def lower_name(name: str) -> str:
    """The name of a matrix's lower plane where both planes lie in one unit."""
    return f"{name}, lower"


def split_rows(tensors: ModelTensors, share: float, keeps_upper: bool = False) -> ModelTensors:
    """The model whose layers keep a share of their output channels on a card, but for an encoder's; with
    `keeps_upper`, and all upper planes. The names of the rest's units have the plane "rest"."""
    stacks = (
        stack if stack.is_encoder else _split_stack(stack, share, keeps_upper) for stack in tensors.stacks
    )
    return replace(tensors, stacks=tuple(stacks))


def _split_stack(stack: Stack, share: float, keeps_upper: bool) -> Stack:
    lower_planes = stack.lower_planes or ((),) * len(stack.layers)
    halves = [
        _split_layer(layer + _named_lower(lower), share, keeps_upper)
        for layer, lower in zip(stack.layers, lower_planes, strict=True)
    ]
    kept, rests = (tuple(each[half] for each in halves) for half in (0, 1))
    return replace(stack, layers=kept, lower_planes=(), rests=rests)


def _named_lower(planes: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    return tuple(replace(plane, name=lower_name(plane.name)) for plane in planes)


def _split_layer(
    tensors: tuple[TensorSpec, ...], share: float, keeps_upper: bool
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    kept, rest = list[TensorSpec](), list[TensorSpec]()
    for tensor in tensors:
        num_rows = tensor.shape[0]
        num_kept = part_rows(num_rows, share) if tensor.can_be_split else num_rows
        num_on_card = num_rows if keeps_upper and _is_upper_plane(tensor) else num_kept
        for part, part_size in ((kept, num_on_card), (rest, num_rows - num_kept)):
            if part_size:
                part.append(replace(tensor, shape=(part_size, *tensor.shape[1:])))
    return tuple(kept), tuple(rest)


def rest_pieces(layout: UnitLayout, share: float, keeps_upper: bool = False) -> Iterator[Piece]:
    """The bytes of a rest of which the card gets a share; with `keeps_upper`, it has the upper planes."""
    for slot in layout.slots:
        if keeps_upper and _is_upper_plane(slot.tensor):
            continue
        num_rows = part_rows(slot.tensor.shape[0], share)
        for component, offset in zip(slot.components, slot.offsets, strict=True):
            if num_rows:
                yield Piece(offset, component.num_bytes // slot.tensor.shape[0] * num_rows)


def copy_part(whole: Sequence[tuple[Unit, Tensor]], part: Unit, target: Tensor) -> None:
    """Fill the buffer of what a card keeps of a layer, or of the rest, from the buffers of the whole layer's
    units. Buffers are uint8."""
    of = {
        lower_name(slot.tensor.name) if unit.key.plane == "lower" else slot.tensor.name: slot.arrays(buffer)
        for unit, buffer in whole
        for slot in unit.layout.slots
    }
    for slot in part.layout.slots:
        for source, array in zip(of[slot.tensor.name], slot.arrays(target), strict=True):
            # Of a matrix, the rest ends where the whole ends, and what is kept begins where it begins.
            first = 0 if part.key.plane is None else len(source) - len(array)
            array.copy_(source[first : first + len(array)])
