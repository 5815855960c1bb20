"""WeightStore: a model's layers as buffers ready to compute with, whatever the checkpoint holds.

A layer is one contiguous buffer (LayerLayout); INT8 matrices are quantized on the way in, some rows at a
time, so that reading a layer takes its INT8 bytes and a few megabytes. Only matrices that the checkpoint
holds transposed (GPT-2's) are read whole, in the checkpoint's dtype, one at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.errors import ConfigError, UnexpectedTensor, WrongTensor
from penstock.kernels import QuantizedTensor
from penstock.memory.direct_io import PAGE
from penstock.spec import LayerLayout, TensorSlot, TensorSpec
from penstock.weights.checkpoint import Checkpoint, TensorEntry
from penstock.weights.formats import check_quantization
from penstock.weights.quantize import QuantizationError, quantize
from penstock.weights.tensor_quantizer import TensorQuantizer

#: Rows from which the error of a whole checkpoint is estimated.
SAMPLE_ROWS = 256
#: Bytes of INT8 that are read at a time.
CHUNK_BYTES = 4 << 20
#: Tensors that some checkpoints carry and no model here needs: they follow from the config.
DERIVED_TENSORS = (r"\.rotary_emb\.inv_freq$", r"\.inv_freq$")


#: In the config.json of a converted model: the head is there for others, and is the embedding's matrix.
TIED_HEAD = "penstock_tied_head"


class LayerWeights:
    """Named views into a layer's buffer."""

    def __init__(self, tensors: dict[str, Tensor | QuantizedTensor]) -> None:
        self._tensors = tensors

    @classmethod
    def views(cls, layout: LayerLayout, buffer: Tensor) -> LayerWeights:
        """Views into `buffer` (uint8 [layout.num_bytes])."""
        return cls({slot.tensor.name: _view(slot, buffer) for slot in layout.slots})

    def matrix(self, name: str) -> QuantizedTensor:
        tensor = self._tensors[name]
        assert isinstance(tensor, QuantizedTensor)
        return tensor

    def vector(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        assert isinstance(tensor, Tensor)
        return tensor

    def optional(self, name: str) -> Tensor | None:
        """A vector that some models have and others lack, such as a bias."""
        return self.vector(name) if name in self._tensors else None

    def map(self, function: Callable[[Tensor], Tensor]) -> LayerWeights:
        """What `function` makes of each tensor, and of each part of a quantized one."""
        return LayerWeights(
            {
                name: QuantizedTensor(*(function(part) for part in tensor))
                if isinstance(tensor, QuantizedTensor)
                else function(tensor)
                for name, tensor in self._tensors.items()
            }
        )

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def items(self) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        yield from self._tensors.items()


def _view(slot: TensorSlot, buffer: Tensor) -> Tensor | QuantizedTensor:
    shape, count = slot.tensor.shape, slot.tensor.num_elements
    if slot.tensor.kind == "float32":
        return buffer[slot.offset : slot.offset + 4 * count].view(torch.float32).view(shape)
    qweight = buffer[slot.offset : slot.offset + count].view(torch.int8).view(shape)
    scale_end = slot.scale_offset + 4 * math.prod(slot.tensor.scale_shape)
    scale = buffer[slot.scale_offset : scale_end].view(torch.float32).view(slot.tensor.scale_shape)
    return QuantizedTensor(qweight, scale)


class FileRange(NamedTuple):
    """Bytes of a file."""

    file: Path
    offset: int
    num_bytes: int


def stored_parts(tensors: tuple[TensorSpec, ...]) -> Iterator[tuple[str, str]]:
    """(name, dtype) of a stack's tensors in a checkpoint, in the order in which LayerLayout has them: a file
    that holds them so holds the buffer."""
    for tensor in tensors:
        for part in tensor.parts:
            yield (part, "F32") if tensor.kind == "float32" else (part + "_scale", "F32")
    for tensor in tensors:
        if tensor.kind == "int8":
            yield from ((part, "I8") for part in tensor.parts)


@dataclass(frozen=True)
class ModelTensors:
    """What a model consists of, as its family declares it."""

    embedding: tuple[TensorSpec, ...]
    layers: tuple[tuple[TensorSpec, ...], ...]
    head: tuple[TensorSpec, ...]
    #: Prefix of the names that checkpoints of the bare model (without a head) leave out.
    optional_prefix: str = ""
    #: Regular expressions of tensors that checkpoints may hold and the model does not need.
    unused: tuple[str, ...] = ()

    @property
    def stacks(self) -> tuple[tuple[TensorSpec, ...], ...]:
        return (self.embedding, *self.layers, self.head)

    @property
    def group_size(self) -> int:
        """Of the layers' matrices."""
        return max((tensor.group_size for layer in self.layers for tensor in layer), default=0)

    def grouped(self, group_size: int) -> ModelTensors:
        """With scales per group in layers and head; embeddings are looked up row by row and keep one for
        each. Raises ConfigError if inputs don't make whole groups."""

        def group(stack: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
            return tuple(
                replace(tensor, group_size=group_size) if tensor.kind == "int8" else tensor
                for tensor in stack
            )

        for tensor in (tensor for stack in (*self.layers, self.head) for tensor in stack):
            if tensor.kind == "int8" and tensor.shape[1] % group_size:
                raise ConfigError(
                    f"{' + '.join(tensor.parts)} has {tensor.shape[1]} inputs, which don't make whole groups "
                    f"of {group_size}; choose another --group-size, or none"
                )
        return replace(self, layers=tuple(map(group, self.layers)), head=group(self.head))


class WeightStore:
    """Reads layers of one model from its checkpoint."""

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
        self.layouts = tuple(LayerLayout.of(layer) for layer in self.tensors.layers)
        #: Bytes read from the checkpoint so far.
        self.bytes_read = 0
        #: While a stack is read for conversion: squares of what quantizing lost, and of the tensor.
        self._errors: dict[str, tuple[float, float]] | None = None
        #: That quantize a tensor at the same time.
        self.num_threads = 1
        self._check_names(ignore_unexpected)

    def close(self) -> None:
        """Close the checkpoint's files."""
        self.checkpoint.close()

    @property
    def num_layers(self) -> int:
        return len(self.layouts)

    @property
    def holds_int8(self) -> bool:
        """Whether the checkpoint is quantized already, in part at least."""
        return any(entry.dtype == "I8" for entry in self.checkpoint.entries.values())

    def read_layer(self, index: int, buffer: Tensor) -> LayerWeights:
        """Layer `index` into `buffer` (uint8 [layouts[index].num_bytes]); returns views into it."""
        return self._fill(self.layouts[index], buffer)

    def contiguous_layer(self, index: int) -> FileRange | None:
        """contiguous() for layer `index`."""
        return self.contiguous(self.tensors.layers[index])

    def contiguous(self, tensors: tuple[TensorSpec, ...]) -> FileRange | None:
        """Where embedding, layer or head lie in a file byte for byte as in their buffer, beginning on a page,
        so that one read brings them. None if the checkpoint is not laid out so."""
        end, first = 0, None
        for name, dtype in stored_parts(tensors):
            entry = self.checkpoint.entries.get(self._bare(name)) or self.checkpoint.entries.get(name)
            if entry is None or entry.dtype != dtype or entry.decode is not None:
                return None
            if first is None:
                first, end = entry, entry.offset
            if (entry.file, entry.offset) != (first.file, end):
                return None
            end += entry.num_bytes
        num_bytes = LayerLayout.of(tensors).num_bytes
        if first is None or first.offset % PAGE or end - first.offset != num_bytes:
            return None
        return FileRange(first.file, first.offset, end - first.offset)

    def read_resident(self, tensors: tuple[TensorSpec, ...]) -> LayerWeights:
        """Embedding or head, into memory of its own."""
        layout = LayerLayout.of(tensors)
        return self._fill(layout, torch.empty(layout.num_bytes, dtype=torch.uint8))

    def read_stack(self, tensors: tuple[TensorSpec, ...], buffer: Tensor) -> dict[str, float]:
        """Embedding, layer or head into `buffer`; returns the relative error of each tensor that was
        quantized on the way."""
        self._errors = {}
        try:
            self._fill(LayerLayout.of(tensors), buffer)
            return {part: (lost / of) ** 0.5 for part, (lost, of) in self._errors.items() if of > 0}
        finally:
            self._errors = None

    def entry(self, part: str) -> TensorEntry:
        """Where a tensor lies, by its name in checkpoints with a head. Raises MissingTensor."""
        return self._find(part)

    def exact_rows(self, tensor: TensorSpec, num_elements: int) -> Iterator[Tensor]:
        """A matrix of an unquantized checkpoint as [some, in_features], about so many elements at a time."""
        step = max(1, num_elements // tensor.shape[1])
        for part in tensor.parts:
            entry = self._find(part)
            if _is_transposed(tensor, entry):
                yield from torch.split(self._rows(tensor, part), step)
            else:
                num_rows = entry.shape[0]
                for start in range(0, num_rows, step):
                    yield self._read(part, start, min(start + step, num_rows))

    def quantization_errors(self, exact: WeightStore | None = None) -> Iterator[QuantizationError]:
        """The error of each INT8 tensor against what the checkpoint holds (or `exact`, the one that it was
        made of), one tensor at a time. Against tensors that are INT8 themselves there is none to report."""
        exact = exact or self
        for tensor in (tensor for stack in self.tensors.stacks for tensor in stack):
            if tensor.kind == "int8" and exact._find(tensor.parts[0]).dtype != "I8":
                rows = torch.cat([exact._rows(tensor, part) for part in tensor.parts]).float()
                ours = (
                    quantize(rows, tensor.group_size)
                    if exact is self
                    else self.read_resident((tensor,)).matrix(tensor.name)
                )
                yield QuantizationError.of(", ".join(tensor.parts), rows, ours)

    def read_exact(self, part: str) -> Tensor:
        """A tensor in float32, in the shape that unquantized checkpoints give it; INT8 is dequantized."""
        exact, entry = self._read(part).float(), self._find(part)
        if entry.dtype != "I8" and entry.decode is None:
            return exact
        if entry.dtype == "I8":
            scale = self._read(part + "_scale").float().view(exact.shape[0], -1)
            exact *= scale.repeat_interleave(exact.shape[1] // scale.shape[1], 1)
        transposed = (tensor for stack in self.tensors.stacks for tensor in stack if tensor.is_transposed)
        return exact.t().contiguous() if any(part in tensor.parts for tensor in transposed) else exact

    def sample_error(self) -> QuantizationError:
        """The error of the first layer's first matrix, or some rows of it: what to expect of the others.
        Raises WrongTensor."""
        tensor = next(tensor for tensor in self.tensors.layers[0] if tensor.kind == "int8")
        part = tensor.parts[0]
        rows = self._read(part, 0, min(SAMPLE_ROWS, self._find(part).shape[0])).float()
        try:
            return QuantizationError.of(part, rows, quantize(rows, tensor.group_size))
        except ValueError as error:
            raise WrongTensor(
                f"tensor {part} in {self._find(part).file} can't be quantized: {error}"
            ) from error

    def _fill(self, layout: LayerLayout, buffer: Tensor) -> LayerWeights:
        weights = LayerWeights.views(layout, buffer)
        for slot in layout.slots:
            if slot.tensor.kind == "int8":
                self._fill_matrix(slot.tensor, weights.matrix(slot.tensor.name))
            else:
                self._fill_vector(slot.tensor, weights.vector(slot.tensor.name))
        return weights

    def _fill_vector(self, tensor: TensorSpec, out: Tensor) -> None:
        torch.cat([self._read(part).float() for part in tensor.parts], out=out)

    def _fill_matrix(self, tensor: TensorSpec, out: QuantizedTensor) -> None:
        row = 0
        for part in tensor.parts:
            entry = self._find(part)
            is_transposed = _is_transposed(tensor, entry)
            end = row + entry.shape[1 if is_transposed else 0]
            rows = QuantizedTensor(out.qweight[row:end], out.scale[row:end])
            if entry.dtype == "I8":
                step = max(1, CHUNK_BYTES // tensor.shape[1])
                for start in range(0, end - row, step):
                    chunk = rows.qweight[start : start + step]
                    self._read(part, start, start + len(chunk), chunk)
                rows.scale.copy_(self._read(part + "_scale").view(rows.scale.shape))
            else:
                quantizer = TensorQuantizer(self.checkpoint, entry, rows, is_transposed)
                sums = quantizer.run(self.num_threads, self._errors is not None)
                self.bytes_read += entry.num_bytes
                if self._errors is not None:
                    self._errors[part] = sums
            row = end

    def _rows(self, tensor: TensorSpec, part: str) -> Tensor:
        """A whole part as [out_features, in_features], in its own dtype."""
        rows = self._read(part)
        return rows.t() if _is_transposed(tensor, self._find(part)) else rows

    def _read(self, name: str, start: int = 0, stop: int | None = None, out: Tensor | None = None) -> Tensor:
        entry = self._find(name)
        end = stop if stop is not None else (entry.shape[0] if entry.shape else 1)
        rows = self.checkpoint.read_rows(entry.name, start, end, out)
        self.bytes_read += rows.nbytes
        return rows

    def _find(self, name: str) -> TensorEntry:
        bare = self._bare(name)
        return self.checkpoint.entry(bare if bare in self.checkpoint.entries else name)

    def _bare(self, name: str) -> str:
        return name.removeprefix(self.tensors.optional_prefix)

    def _check_names(self, ignore_unexpected: bool) -> None:
        known: set[str] = set()
        for tensor in (tensor for stack in self.tensors.stacks for tensor in stack):
            rows = 0
            for part in tensor.parts:
                entry = self._find(part)
                rows += _check_part(tensor, entry)
                known.add(entry.name)
                if entry.dtype == "I8":
                    known |= {_check_scale(tensor, entry, self._find(part + "_scale")), entry.name + "_shape"}
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


def _is_transposed(tensor: TensorSpec, entry: TensorEntry) -> bool:
    """Whether it is read as [in_features, out_features], which INT8 and what is decoded never are."""
    return tensor.is_transposed and entry.dtype != "I8" and entry.decode is None


def _check_part(tensor: TensorSpec, entry: TensorEntry) -> int:
    """Rows that a part adds to its tensor. Raises WrongTensor."""
    is_transposed = _is_transposed(tensor, entry)
    shape = entry.shape[::-1] if is_transposed else entry.shape
    if len(shape) != len(tensor.shape) or shape[1:] != tensor.shape[1:]:
        raise WrongTensor(
            f"tensor {entry.name} in {entry.file} has shape {list(entry.shape)}; the config calls for "
            f"{'rows of ' if len(tensor.parts) > 1 else ''}{list(tensor.shape)}"
            f"{' transposed' if is_transposed else ''}"
        )
    if tensor.kind == "float32" and entry.dtype == "I8":
        raise WrongTensor(f"tensor {entry.name} in {entry.file} is INT8; it must be floating point")
    return shape[0] if shape else 1


def _check_scale(tensor: TensorSpec, entry: TensorEntry, scale: TensorEntry) -> str:
    """The name of a scale. Raises WrongTensor if there are not as many as there should be."""
    groups = tensor.scale_shape[1] if tensor.group_size else 1
    if scale.shape not in ((entry.shape[0], groups), (entry.shape[0] * groups,)):
        raise WrongTensor(
            f"tensor {scale.name} in {scale.file} has shape {list(scale.shape)}; the quantization that "
            f"config.json names calls for {[entry.shape[0], groups]}"
        )
    return scale.name
