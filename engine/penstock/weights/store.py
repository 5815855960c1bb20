"""WeightStore: a model's units as buffers ready to compute with, whatever the checkpoint holds.

A unit is one contiguous buffer (UnitLayout), which its tensors' formats fill some rows at a time, so that
reading a layer takes its own bytes and a few megabytes. Only matrices that the checkpoint holds transposed
(GPT-2's) are read whole, in the checkpoint's dtype, one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.errors import ConfigError, UnexpectedTensor, WrongTensor
from penstock.memory.pages import PAGE
from penstock.spec import UnitKey
from penstock.weights.checkpoints.checkpoint import Checkpoint, TensorEntry
from penstock.weights.checkpoints.formats import check_quantization
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.quantize import QuantizationError
from penstock.weights.tensors import ModelTensors, TensorSpec, UnitLayout, stored_arrays
from penstock.weights.weight_format import Loss, is_transposed

#: Rows from which the error of a whole checkpoint is estimated.
SAMPLE_ROWS = 256
#: Tensors that some checkpoints carry and no model here needs: they follow from the config.
DERIVED_TENSORS = (r"\.rotary_emb\.inv_freq$", r"\.inv_freq$")


#: In the config.json of a converted model: the head is there for others, and is the embedding's matrix.
TIED_HEAD = "penstock_tied_head"


class FileRange(NamedTuple):
    """Bytes of a file."""

    file: Path
    offset: int
    num_bytes: int


class WeightStore:
    """Reads units of one model from its checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensors: ModelTensors,
        ignore_unexpected: bool = False,
        group_size: int | None = None,
    ) -> None:
        """Checks that every tensor is there with its shape and that nothing else is. An unquantized
        checkpoint gets scales per `group_size` inputs, one in INT8 has its own.

        Raises MissingTensor, WrongTensor, UnexpectedTensor, UnsupportedModel (a quantization that is not
        ours) and ConfigError (a group size that can't be had).
        """
        own_group_size = check_quantization(checkpoint.config)
        if own_group_size is not None and group_size not in (None, own_group_size):
            raise ConfigError(
                f"{checkpoint.folder} is INT8 already, with scales per "
                f"{f'{own_group_size} inputs' if own_group_size else 'output channel'}; --group-size is for "
                "unquantized checkpoints"
            )
        group_size = group_size if own_group_size is None else own_group_size
        self.checkpoint = checkpoint
        self.tensors = tensors.grouped(group_size) if group_size else tensors
        self.units = {unit.key: unit for unit in self.tensors.units}
        #: Bytes read from the checkpoint so far.
        self.bytes_read = 0
        self._check_names(ignore_unexpected)

    def close(self) -> None:
        """Close the checkpoint's files."""
        self.checkpoint.close()

    @property
    def num_layers(self) -> int:
        return len(self.tensors.layers)

    @property
    def is_quantized(self) -> bool:
        """Whether the checkpoint is quantized already, in part at least."""
        return any(
            tensor.is_matrix and tensor.format.holds(self.entry(part))
            for tensors in self.tensors.groups
            for tensor in tensors
            for part in tensor.parts
        )

    def read_unit(self, key: UnitKey, buffer: Tensor, num_threads: int = 1) -> LayerWeights:
        """A unit into `buffer` (uint8, at least its bytes); returns views into it. `num_threads` quantize a
        tensor at the same time."""
        return self._fill(self.units[key].layout, buffer, num_threads)

    def contiguous_unit(self, key: UnitKey) -> FileRange | None:
        """contiguous() for a unit."""
        return self.contiguous(self.units[key].tensors)

    def contiguous(self, tensors: tuple[TensorSpec, ...]) -> FileRange | None:
        """Where embedding, unit or head lie in a file byte for byte as in their buffer, beginning on a page,
        so that one read brings them. None if the checkpoint is not laid out so."""
        end, first = 0, None
        for array in stored_arrays(tensors):
            name = array.name
            entry = self.checkpoint.entries.get(self._bare(name)) or self.checkpoint.entries.get(name)
            if entry is None or entry.dtype != array.component.dtype or entry.decode is not None:
                return None
            if first is None:
                first, end = entry, entry.offset
            if (entry.file, entry.offset) != (first.file, end):
                return None
            end += entry.num_bytes
        num_bytes = UnitLayout.of(tensors).num_bytes
        if first is None or first.offset % PAGE or end - first.offset != num_bytes:
            return None
        return FileRange(first.file, first.offset, end - first.offset)

    def read_resident(self, tensors: tuple[TensorSpec, ...]) -> LayerWeights:
        """Embedding or head, into memory of its own."""
        layout = UnitLayout.of(tensors)
        return self._fill(layout, torch.empty(layout.num_bytes, dtype=torch.uint8), num_threads=1)

    def read_with_errors(
        self, tensors: tuple[TensorSpec, ...], buffer: Tensor, num_threads: int = 1
    ) -> dict[str, float]:
        """Embedding, unit or head into `buffer`; returns the relative error of each part that was quantized
        on the way."""
        losses: dict[str, Loss] = {}
        for slot in UnitLayout.of(tensors).slots:
            losses |= slot.tensor.format.fill(self, slot.tensor, slot.arrays(buffer), num_threads, True)
        return {part: (loss.lost / loss.of) ** 0.5 for part, loss in losses.items() if loss.of > 0}

    def entry(self, name: str) -> TensorEntry:
        """Where a tensor lies, by its name in checkpoints with a head. Raises MissingTensor."""
        bare = self._bare(name)
        return self.checkpoint.entry(bare if bare in self.checkpoint.entries else name)

    def read(self, name: str, start: int = 0, stop: int | None = None, out: Tensor | None = None) -> Tensor:
        """Rows start:stop (None: to the end) of a tensor, in the checkpoint's dtype. Raises CorruptFile."""
        entry = self.entry(name)
        end = stop if stop is not None else (entry.shape[0] if entry.shape else 1)
        rows = self.checkpoint.read_rows(entry.name, start, end, out)
        self.count(rows.nbytes)
        return rows

    def count(self, num_bytes: int) -> None:
        """Bytes that were read from the checkpoint without read()."""
        self.bytes_read += num_bytes

    def exact_rows(self, tensor: TensorSpec, num_elements: int) -> Iterator[Tensor]:
        """A matrix of an unquantized checkpoint as [some, in_features], about so many elements at a time."""
        step = max(1, num_elements // tensor.shape[1])
        for part in tensor.parts:
            entry = self.entry(part)
            if is_transposed(tensor, entry):
                yield from torch.split(self._rows(tensor, part), step)
            else:
                num_rows = entry.shape[0]
                for start in range(0, num_rows, step):
                    yield self.read(part, start, min(start + step, num_rows))

    def quantization_errors(self, exact: WeightStore | None = None) -> Iterator[QuantizationError]:
        """The error of each matrix against what the checkpoint holds (or `exact`, the one that it was made
        of), one tensor at a time. Against tensors that are quantized themselves there is none to report."""
        exact = exact or self
        for tensor in (tensor for tensors in self.tensors.groups for tensor in tensors):
            if tensor.is_matrix and not tensor.format.holds(exact.entry(tensor.parts[0])):
                rows = torch.cat([exact._rows(tensor, part) for part in tensor.parts]).float()
                ours = (
                    tensor.format.from_rows(rows)
                    if exact is self
                    else self.read_resident((tensor,)).matrix(tensor.name)
                )
                yield QuantizationError.of(", ".join(tensor.parts), rows, ours)

    def read_exact(self, part: str) -> Tensor:
        """A tensor in float32, in the shape that unquantized checkpoints give it; what is quantized is
        dequantized."""
        exact, entry = self.read(part).float(), self.entry(part)
        tensor = self._tensor_of.get(part)
        is_stored = tensor is not None and tensor.is_matrix and tensor.format.holds(entry)
        if is_stored and tensor is not None:
            exact = tensor.format.dequantize(self, part, exact)
        is_turned = is_stored or entry.decode is not None
        return exact.t().contiguous() if tensor is not None and tensor.is_transposed and is_turned else exact

    def sample_error(self) -> QuantizationError:
        """The error of the first layer's first matrix, or some rows of it: what to expect of the others.
        Raises WrongTensor."""
        tensor = next(tensor for tensor in self.tensors.layers[0] if tensor.is_matrix)
        part = tensor.parts[0]
        rows = self.read(part, 0, min(SAMPLE_ROWS, self.entry(part).shape[0])).float()
        try:
            return QuantizationError.of(part, rows, tensor.format.from_rows(rows))
        except ValueError as error:
            raise WrongTensor(
                f"tensor {part} in {self.entry(part).file} can't be quantized: {error}"
            ) from error

    def _fill(self, layout: UnitLayout, buffer: Tensor, num_threads: int) -> LayerWeights:
        for slot in layout.slots:
            slot.tensor.format.fill(self, slot.tensor, slot.arrays(buffer), num_threads)
        return LayerWeights.views(layout, buffer)

    def _rows(self, tensor: TensorSpec, part: str) -> Tensor:
        """A whole part as [out_features, in_features], in its own dtype."""
        rows = self.read(part)
        return rows.t() if is_transposed(tensor, self.entry(part)) else rows

    def _bare(self, name: str) -> str:
        return name.removeprefix(self.tensors.optional_prefix)

    def _check_names(self, ignore_unexpected: bool) -> None:
        known: set[str] = set()
        self._tensor_of: dict[str, TensorSpec] = {}
        for tensor in (tensor for tensors in self.tensors.groups for tensor in tensors):
            known |= tensor.format.check(self, tensor)
            self._tensor_of |= dict.fromkeys(tensor.parts, tensor)
            rows = sum(_num_rows(tensor, self.entry(part)) for part in tensor.parts)
            if rows != tensor.shape[0]:
                raise WrongTensor(
                    f"{' + '.join(tensor.parts)} in {self.checkpoint.folder}: {rows} rows together, the "
                    f"config calls for {tensor.shape[0]}"
                )
        unused = [re.compile(pattern) for pattern in (*DERIVED_TENSORS, *self.tensors.unused)]
        extra = [
            name
            for name in self.checkpoint.entries
            if name not in known | self.checkpoint.idle and not any(p.search(name) for p in unused)
        ]
        if extra and not ignore_unexpected:
            entry = self.checkpoint.entries[extra[0]]
            raise UnexpectedTensor(
                f"{entry.file} holds {entry.name}"
                + (f" and {len(extra) - 1} more tensors" if len(extra) > 1 else "")
                + " that this architecture does not use, so its answers might not be the model's. If you "
                "know that they don't matter, pass --ignore-unexpected-tensors"
            )


def _num_rows(tensor: TensorSpec, entry: TensorEntry) -> int:
    """That a part adds to its tensor."""
    shape = entry.shape[::-1] if is_transposed(tensor, entry) else entry.shape
    return shape[0] if shape else 1
