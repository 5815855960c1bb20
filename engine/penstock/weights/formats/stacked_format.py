"""Stacked: the weight format of matrices whose parts are kept in several formats; and the formats in which a
checkpoint keeps its matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from penstock.kernels import Matrix, StackedMatrix
from penstock.weights.checkpoints.quantized.quantization_config import int8_group_sizes
from penstock.weights.checkpoints.tensor_entry import TensorEntry
from penstock.weights.formats.int4_format import Int4
from penstock.weights.formats.weight_format import Component, Loss, WeightFormat
from penstock.weights.tensor_source import TensorSource, is_transposed

if TYPE_CHECKING:
    from penstock.weights.tensors import TensorSpec


@dataclass(frozen=True)
class Stacked:
    """The parts of a matrix, each in a format of its own: (format, rows) in the order of the parts."""

    parts: tuple[tuple[WeightFormat, int], ...]
    is_matrix: ClassVar[bool] = True
    can_be_split: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return " + ".join(kind.name for kind, _ in self.parts)

    @property
    def operand_types(self) -> tuple[type, ...]:
        return StackedMatrix, *(one for kind, _ in self.parts for one in kind.operand_types)

    @property
    def group_size(self) -> int:
        return max(kind.group_size for kind, _ in self.parts)

    def components(self, shape: tuple[int, ...]) -> tuple[Component, ...]:
        return tuple(one for kind, rows in self.parts for one in kind.components((rows, *shape[1:])))

    def operand(self, arrays: Sequence[Tensor]) -> StackedMatrix:
        matrices: list[Matrix] = []
        for (kind, _), own in zip(self.parts, self._split(arrays), strict=True):
            matrix = kind.operand(own)
            assert not isinstance(matrix, Tensor)
            matrices.append(matrix)
        return StackedMatrix(tuple(matrices))

    def _split(self, arrays: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """The arrays of each part."""
        split, first = [], 0
        for kind, rows in self.parts:
            count = len(kind.components((rows, 256)))
            split.append(arrays[first : first + count])
            first += count
        return split

    def holds(self, entry: TensorEntry) -> bool:
        return False

    def grouped(self, tensor: TensorSpec, group_size: int) -> Stacked:
        return self

    def scheme(self) -> dict[str, Any] | None:
        return None

    def check(self, source: TensorSource, tensor: TensorSpec) -> set[str]:
        return set().union(*(own.format.check(source, own) for own in self.by_part(tensor)))

    def by_part(self, tensor: TensorSpec) -> list[TensorSpec]:
        """Each part as a tensor of its own."""
        return [
            replace(tensor, parts=(part,), shape=(rows, *tensor.shape[1:]), format=kind)
            for part, (kind, rows) in zip(tensor.parts, self.parts, strict=True)
        ]

    def fill(
        self,
        source: TensorSource,
        tensor: TensorSpec,
        arrays: Sequence[Tensor],
        num_threads: int = 1,
        with_loss: bool = False,
    ) -> dict[str, Loss]:
        losses: dict[str, Loss] = {}
        for own, each in zip(self.by_part(tensor), self._split(arrays), strict=True):
            losses |= own.format.fill(source, own, each, num_threads, with_loss)
        return losses

    def dequantize(self, source: TensorSource, part: str, exact: Tensor) -> Tensor:
        raise TypeError("the parts of a stacked matrix are read one by one")

    def from_rows(self, rows: Tensor) -> Matrix:
        raise TypeError("the parts of a stacked matrix are made one by one")

    def fill_random(self, arrays: Sequence[Tensor], generator: torch.Generator) -> None:
        for (kind, _), own in zip(self.parts, self._split(arrays), strict=True):
            kind.fill_random(own, generator)


def in_one_format(tensor: TensorSpec) -> list[TensorSpec]:
    """The parts of a stacked matrix as matrices, each in its own format; otherwise the tensor itself."""
    return tensor.format.by_part(tensor) if isinstance(tensor.format, Stacked) else [tensor]


def has_steps(tensor: TensorSpec) -> bool:
    """Whether a matrix, or a part of it, has units and steps, and scales for other tools: as Penstock
    quantizes to 4 bits."""
    kinds = (own.format for own in in_one_format(tensor))
    return any(isinstance(kind, Int4) and kind.form.has_scales_for_others for kind in kinds)


def stored_format(tensor: TensorSpec, source: TensorSource, keeps_groups: bool = True) -> WeightFormat:
    """The format in which a matrix is kept without loss, where the checkpoint has 4-bit codes or INT8 in
    groups; INT8 in groups of as many inputs as the checkpoint's where it has other numbers; otherwise the
    tensor's own. Unless `keeps_groups`, what can be INT8 has a scale for each output channel."""
    entries = [source.find(part) for part in tensor.parts]
    found = [entry for entry in entries if entry is not None]
    if len(found) < len(entries):
        return tensor.format
    kinds = [_format_of(tensor, entry, source, keeps_groups) for entry in found]
    is_permuted = any(isinstance(kind, Int4) and kind.form.is_permuted for kind in kinds)
    if len(kinds) == 1 or (len(set(kinds)) == 1 and not is_permuted):
        return kinds[0]
    turned = [
        is_transposed(replace(tensor, format=kind), entry) for kind, entry in zip(kinds, found, strict=True)
    ]
    rows = [entry.shape[1 if is_turned else 0] for entry, is_turned in zip(found, turned, strict=True)]
    return Stacked(tuple(zip(kinds, rows, strict=True)))


def _format_of(
    tensor: TensorSpec, entry: TensorEntry, source: TensorSource, keeps_groups: bool
) -> WeightFormat:
    if entry.int4 is not None:
        return Int4(entry.int4.form)
    own = tensor.format.group_size
    # The group size that a user has chosen stays.
    wish = entry.group_size if keeps_groups else 0
    size = _int8_group_size(entry, own, source) if entry.dtype == "I8" else own or wish
    if size == own or (size and tensor.shape[1] % size):
        return tensor.format
    return tensor.format.grouped(tensor, size)


def _int8_group_size(entry: TensorEntry, named: int, source: TensorSource) -> int:
    """Inputs that share a scale in a matrix of INT8. A model may have matrices with groups beside others
    without: the scales of each show which it is. `named`: what config.json says of most matrices."""
    known, scale = int8_group_sizes(source.checkpoint.config), source.find(f"{entry.name}_scale")
    if scale is None or len(scale.shape) != 2:
        return named
    size = entry.shape[1] // scale.shape[1] if scale.shape[1] > 1 else 0
    return size if size in known else named
