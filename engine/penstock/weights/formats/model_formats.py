"""The formats of a model's matrices: the same model with others, and which ones it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.config import GROUP_SIZES
from penstock.kernels import Int4Tensor
from penstock.kernels.low_codes import CODE_BITS
from penstock.weights.checkpoints.int4_form import Int4Form
from penstock.weights.formats.stacked_format import in_one_format, stored_format
from penstock.weights.formats.weight_format import WeightFormat
from penstock.weights.tensor_source import TensorSource
from penstock.weights.tensors import ModelTensors, TensorSpec

if TYPE_CHECKING:
    from penstock.weights.checkpoints.quantized.module_kinds import Kind, KindOf

#: The format that a tensor gets.
Choose = Callable[[TensorSpec], WeightFormat]


def has_planes(tensors: ModelTensors) -> bool:
    """Whether upper and lower planes of a layer lie apart."""
    return any(unit.key.plane is not None for unit in tensors.units)


def has_int4(tensors: ModelTensors) -> bool:
    """Whether a matrix is kept in codes of 4 bits, or of 3 or 2."""
    return any(Int4Tensor in tensor.format.operand_types for tensor in tensors.multiplied)


def code_names(tensors: ModelTensors) -> str:
    """How many bits the codes of a model have: "int4", or "int2 + int3"."""
    kinds = (own.format for tensor in tensors.multiplied for own in in_one_format(tensor))
    names = {kind.name.partition(",")[0].split()[0] for kind in kinds if Int4Tensor in kind.operand_types}
    return " + ".join(sorted(names))


def grouped(tensors: ModelTensors, group_size: int) -> ModelTensors:
    """The same model with INT8 scales per group in units and head. Embeddings are looked up row by row and
    keep one scale for each row."""

    def group(tensor: TensorSpec) -> WeightFormat:
        return tensor.format.grouped(tensor, group_size)

    return _with_formats(tensors, unit=group, head=group)


def grouped_to_fit(tensors: ModelTensors, group_sizes: set[int]) -> ModelTensors:
    """The same, with the largest of these groups that make up the inputs of a matrix. Where none does, a
    matrix has a scale for each row."""

    def group(tensor: TensorSpec) -> WeightFormat:
        fitting = [size for size in group_sizes if tensor.shape[-1] % size == 0]
        return tensor.format.grouped(tensor, max(fitting, default=0))

    return _with_formats(tensors, unit=group, head=group)


def in_codes(
    tensors: ModelTensors, group_size: int, has_steps: bool = True, weights: str = "int4"
) -> ModelTensors:
    """The same model with codes of 4 bits ("int4"), or of 3 or 2, in its units' matrices; embedding and head
    stay INT8. `has_steps`: as Penstock quantizes them itself."""
    from penstock.weights.formats.int4_format import Int4

    form = Int4Form(group_size, codebook="signed" if weights == "int4" else weights, has_steps=has_steps)

    def pack(tensor: TensorSpec) -> WeightFormat:
        return Int4(form) if tensor.is_matrix else tensor.format

    return _with_formats(tensors, unit=pack)


def as_named(tensors: ModelTensors, kind_of: KindOf, has_steps: bool) -> ModelTensors:
    """The same model with the matrices of its units and head as they will be kept where the checkpoint has
    these kinds. `has_steps`: 4-bit codes are as Penstock quantizes them itself."""

    def choose(tensor: TensorSpec) -> WeightFormat:
        kind = kind_of(tensor.parts[0].removesuffix(".weight")) if tensor.is_matrix else None
        return tensor.format if kind is None else _kept_format(tensor, kind, has_steps)

    return _with_formats(tensors, unit=choose, head=choose)


def _kept_format(tensor: TensorSpec, kind: Kind, has_steps: bool) -> WeightFormat:
    if kind.name in ("int4", "mxfp4", "nvfp4", "int3", "int2"):
        return _kept_int4(kind, has_steps)
    size = kind.group_size
    if kind.name == "fp8" and not size:
        from penstock.weights.checkpoints.quantized.fp8 import fp8_group_size

        size = fp8_group_size(tensor.shape[-1])
    return tensor.format.grouped(tensor, 0 if size and tensor.shape[-1] % size else size)


def _kept_int4(kind: Kind, has_steps: bool) -> WeightFormat:
    """Codes of 4 bits, or of 3 or 2, by the name of their kind."""
    from penstock.weights.formats.int4_format import Int4

    if kind.name == "mxfp4":
        from penstock.weights.checkpoints.quantized.mxfp4 import Mxfp4

        return Int4(Mxfp4.form)
    if kind.name == "nvfp4":
        from penstock.weights.checkpoints.quantized.nvfp4 import Nvfp4

        return Int4(Nvfp4.form)
    if kind.name in CODE_BITS:
        return Int4(Int4Form(kind.group_size, codebook=kind.name, has_steps=True))
    largest = max(GROUP_SIZES)
    return Int4(Int4Form(min(kind.group_size or largest, largest), has_steps=has_steps))


def with_experts_in(tensors: ModelTensors, kind: WeightFormat) -> ModelTensors:
    """The same model with the matrices of its experts in this format."""

    def change(expert: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(replace(each, format=kind) if each.is_matrix else each for each in expert)

    stacks = tuple(
        replace(stack, experts=tuple(tuple(map(change, experts)) for experts in stack.experts))
        for stack in tensors.stacks
    )
    return replace(tensors, stacks=stacks)


def with_matrices_in(tensors: ModelTensors, formats: Mapping[TensorSpec, WeightFormat]) -> ModelTensors:
    """The same model with some matrices of its units in these formats."""
    return _with_formats(tensors, unit=lambda tensor: formats.get(tensor, tensor.format))


def as_stored(tensors: ModelTensors, source: TensorSource, keeps_groups: bool = True) -> ModelTensors:
    """The same model with its matrices in 4 bits, or in INT8 in groups, where the checkpoint has them so. For
    `keeps_groups` see stored_format()."""

    def keep(tensor: TensorSpec) -> WeightFormat:
        return stored_format(tensor, source, keeps_groups) if tensor.is_matrix else tensor.format

    return _with_formats(tensors, unit=keep, head=keep, embedding=keep)


def _with_formats(
    tensors: ModelTensors, unit: Choose, head: Choose | None = None, embedding: Choose | None = None
) -> ModelTensors:
    """The same model in other formats. None: head or embedding stay as they are."""

    def change(each: tuple[TensorSpec, ...], choose: Choose | None) -> tuple[TensorSpec, ...]:
        return tuple(replace(tensor, format=choose(tensor)) for tensor in each) if choose else each

    stacks = tuple(
        replace(
            stack,
            layers=tuple(change(layer, unit) for layer in stack.layers),
            experts=tuple(tuple(change(one, unit) for one in experts) for experts in stack.experts),
        )
        for stack in tensors.stacks
    )
    return replace(
        tensors,
        embedding=change(tensors.embedding, embedding),
        stacks=stacks,
        head=change(tensors.head, head),
    )
