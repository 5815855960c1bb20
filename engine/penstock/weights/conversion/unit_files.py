"""UnitFile: which files the weights of a converted model consist of, and what each holds.

Embedding, head and each dense unit have a file. The experts of a layer share files, since a model may have
15,000 experts. In such a file each expert begins on a page, so that one direct read brings the expert: after
each expert there are bytes of padding, as a tensor, because safetensors allows no gaps.

After what Penstock reads of a unit in Penstock's own 4 bits there are its scales in bfloat16, for other
tools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from torch import Tensor

from penstock.kernels import Int4Tensor, StackedMatrix
from penstock.memory.pages import PAGE
from penstock.spec import DECODER
from penstock.weights.checkpoints.own_head import HEAD
from penstock.weights.conversion.converted_config import has_copied_head
from penstock.weights.formats.int4_format import Int4
from penstock.weights.formats.stacked_format import has_steps, in_one_format
from penstock.weights.formats.weight_format import Floats
from penstock.weights.tensors import (
    ModelTensors,
    StoredArray,
    TensorSpec,
    Unit,
    UnitLayout,
    beside_shared,
    stored_arrays,
)

#: The most bytes of a file with several experts. A conversion that was stopped begins the file again in which
#: it was stopped.
MAX_EXPERTS_BYTES = 2 << 30
#: How the names of padding end. vLLM skips names with this ending that it does not know.
PADDING = ".padding_bias"
#: How the names of files with a head of multi-token prediction begin.
MTP = "model-mtp"


@dataclass(frozen=True)
class StoredUnit:
    """Embedding, a unit or head, as a part of a file."""

    tensors: tuple[TensorSpec, ...]
    #: The same tensors under the names that they have in the file.
    stored: tuple[TensorSpec, ...]
    #: What follows tensors and scales in the file, in bytes.
    padding: tuple[TensorSpec, ...] = ()

    @cached_property
    def layout(self) -> UnitLayout:
        return UnitLayout.of(self.tensors)

    @property
    def num_padding_bytes(self) -> int:
        return sum(tensor.num_elements for tensor in self.padding)

    @property
    def num_scale_bytes(self) -> int:
        """The bytes of scales for other tools."""
        return _scale_bytes(self.tensors)

    @property
    def num_file_bytes(self) -> int:
        """The bytes of the unit's buffer that the file has, of scales, and of padding."""
        return self.layout.num_stored_bytes + self.num_scale_bytes + self.num_padding_bytes

    def arrays(self) -> Iterator[StoredArray]:
        """The arrays of the file, in their order: what Penstock reads, scales for other tools, padding."""
        yield from stored_arrays(self.stored)
        for tensor, kind in _in_steps(self.stored):
            yield from (StoredArray(tensor, part, kind.scales(tensor.shape)) for part in tensor.parts)
        yield from stored_arrays(self.padding)

    def scales(self, buffer: Tensor) -> Iterator[Tensor]:
        """The scales for other tools, [out_features, num_groups] of each matrix, from the unit's buffer."""
        for slot in self.layout.slots:
            if not has_steps(slot.tensor):
                continue
            whole = slot.tensor.format.operand(slot.arrays(buffer))
            parts = whole.parts if isinstance(whole, StackedMatrix) else (whole,)
            for own, matrix in zip(in_one_format(slot.tensor), parts, strict=True):
                if has_steps(own):
                    assert isinstance(matrix, Int4Tensor)
                    yield matrix.group_scales()[0].to(matrix.scale.dtype)


@dataclass(frozen=True)
class UnitFile:
    """A file of a converted model: embedding, a dense unit, head, or some experts of a layer."""

    name: str
    units: tuple[StoredUnit, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the units' buffers, and of scales for other tools."""
        return sum(unit.layout.num_bytes + unit.num_scale_bytes for unit in self.units)

    @property
    def num_stored_bytes(self) -> int:
        """Bytes of the data in the file."""
        return sum(unit.num_file_bytes for unit in self.units)


def unit_files(tensors: ModelTensors) -> list[UnitFile]:
    """The files of a converted model, in the order of `ModelTensors.groups`, with a tied head after the
    model's own."""
    files = [_file("model-embedding", tensors.embedding)]
    files += _layer_files(tensors)
    files.append(_file("model-head", tensors.head))
    if has_copied_head(tensors):
        matrix = tensors.output_matrix
        files.append(_file("model-tied-head", (matrix,), (replace(matrix, parts=(HEAD,)),)))
    if tensors.mtp is not None:
        mtp = tensors.mtp
        files.append(_file(f"{MTP}-embedding", beside_shared(mtp.embedding)))
        files += _layer_files(mtp, MTP)
        files.append(_file(f"{MTP}-head", beside_shared(mtp.head)))
    return files


def _layer_files(tensors: ModelTensors, model: str = "model") -> Iterator[UnitFile]:
    for is_expert, units in groupby(tensors.units, lambda unit: unit.key.expert is not None and unit.key[:2]):
        if is_expert:
            yield from _expert_files(list(units), model)
        else:
            yield from (_file(_unit_name(unit, model), unit.tensors) for unit in units)


def _file(
    name: str, tensors: tuple[TensorSpec, ...], stored: tuple[TensorSpec, ...] | None = None
) -> UnitFile:
    """A file with one unit."""
    return UnitFile(f"{name}.safetensors", (StoredUnit(tensors, tensors if stored is None else stored),))


def _expert_files(experts: list[Unit], model: str) -> Iterator[UnitFile]:
    """The files of a layer's experts. A file is named by its first expert."""
    per_file = max(1, MAX_EXPERTS_BYTES // experts[0].num_bytes)
    for first in range(0, len(experts), per_file):
        units = experts[first : first + per_file]
        name = f"{_unit_name(units[0], model)}.safetensors"
        yield UnitFile(name, tuple(StoredUnit(unit.tensors, unit.tensors, _padding(unit)) for unit in units))


def _padding(expert: Unit) -> tuple[TensorSpec, ...]:
    """What makes whole pages of an expert in a file."""
    missing = -(expert.layout.num_stored_bytes + _scale_bytes(expert.tensors)) % PAGE
    name = f"{expert.tensors[0].parts[0].removesuffix('.weight')}{PADDING}"
    return (TensorSpec("padding", (missing,), (name,), Floats("U8")),) if missing else ()


def _in_steps(tensors: Iterable[TensorSpec]) -> Iterator[tuple[TensorSpec, Int4]]:
    """The matrices whose scales are there for other tools, each with its format."""
    for own in (own for tensor in tensors for own in in_one_format(tensor)):
        if isinstance(own.format, Int4) and own.format.form.has_scales_for_others:
            yield own, own.format


def _scale_bytes(tensors: Iterable[TensorSpec]) -> int:
    return sum(kind.scales(tensor.shape).num_bytes for tensor, kind in _in_steps(tensors))


def _unit_name(unit: Unit, model: str) -> str:
    stack, layer, expert, plane = unit.key
    return (
        model
        + ("" if stack == DECODER else f"-{stack}")
        + f"-layer-{layer:05d}"
        + ("" if expert is None else f"-experts-{expert:05d}")
        + ("" if plane is None else f"-{plane}")
    )
