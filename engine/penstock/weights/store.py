"""WeightStore: a model's layers as buffers ready to compute with, whatever the checkpoint holds.

A layer is one contiguous buffer (LayerLayout); INT8 matrices are quantized on the way in, some rows at a
time, so that reading a layer takes its INT8 bytes and a few megabytes. Only matrices that the checkpoint
holds transposed (GPT-2's) are read whole, in the checkpoint's dtype, one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import UnexpectedTensor, UnsupportedModel, WrongTensor
from penstock.kernels import QuantizedTensor
from penstock.memory.direct_io import PAGE
from penstock.spec import LayerLayout, TensorSlot, TensorSpec
from penstock.weights.checkpoint import Checkpoint, TensorEntry
from penstock.weights.quantize import QuantizationError, quantize
from penstock.weights.tensor_quantizer import TensorQuantizer

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

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def items(self) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        yield from self._tensors.items()


def _view(slot: TensorSlot, buffer: Tensor) -> Tensor | QuantizedTensor:
    shape, count = slot.tensor.shape, slot.tensor.num_elements
    if slot.tensor.kind == "float32":
        return buffer[slot.offset : slot.offset + 4 * count].view(torch.float32).view(shape)
    qweight = buffer[slot.offset : slot.offset + count].view(torch.int8).view(shape)
    scale = buffer[slot.scale_offset : slot.scale_offset + 4 * shape[0]].view(torch.float32)
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


class WeightStore:
    """Reads layers of one model from its checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, tensors: ModelTensors, ignore_unexpected: bool = False
    ) -> None:
        """Checks that every tensor is there with its shape and that nothing else is.

        Raises MissingTensor, WrongTensor, UnexpectedTensor and UnsupportedModel (a quantization that is
        not ours).
        """
        self.checkpoint = checkpoint
        self.tensors = tensors
        self.layouts = tuple(LayerLayout.of(layer) for layer in tensors.layers)
        #: Bytes read from the checkpoint so far.
        self.bytes_read = 0
        #: While a stack is read for conversion: squares of what quantizing lost, and of the tensor.
        self._errors: dict[str, tuple[float, float]] | None = None
        self._num_threads = 1
        check_quantization(checkpoint.config)
        self._check_names(ignore_unexpected)

    @property
    def num_layers(self) -> int:
        return len(self.layouts)

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
            if entry is None or entry.dtype != dtype:
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

    def read_stack(
        self, tensors: tuple[TensorSpec, ...], buffer: Tensor, num_threads: int = 1
    ) -> dict[str, float]:
        """Embedding, layer or head into `buffer`, quantized by `num_threads` at once; returns the relative
        error of each tensor that was quantized on the way."""
        self._errors, self._num_threads = {}, num_threads
        try:
            self._fill(LayerLayout.of(tensors), buffer)
            return {part: (lost / of) ** 0.5 for part, (lost, of) in self._errors.items() if of > 0}
        finally:
            self._errors, self._num_threads = None, 1

    def entry(self, part: str) -> TensorEntry:
        """Where a tensor lies, by its name in checkpoints with a head. Raises MissingTensor."""
        return self._find(part)

    def quantization_errors(self) -> Iterator[QuantizationError]:
        """The error of each INT8 tensor against what the checkpoint holds, one tensor at a time. Tensors
        that the checkpoint itself holds in INT8 have none to report."""
        for tensor in (tensor for stack in self.tensors.stacks for tensor in stack):
            if tensor.kind == "int8" and self._find(tensor.parts[0]).dtype != "I8":
                rows = torch.cat([self._rows(tensor, part) for part in tensor.parts]).float()
                yield QuantizationError.of(", ".join(tensor.parts), rows, quantize(rows))

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
            # INT8 is always [out_features, in_features].
            is_transposed = tensor.is_transposed and entry.dtype != "I8"
            end = row + entry.shape[1 if is_transposed else 0]
            rows = QuantizedTensor(out.qweight[row:end], out.scale[row:end])
            if entry.dtype == "I8":
                self._read(part, out=rows.qweight)
                rows.scale.copy_(self._read(part + "_scale").flatten())
            else:
                quantizer = TensorQuantizer(self.checkpoint, entry, rows, is_transposed)
                sums = quantizer.run(self._num_threads, self._errors is not None)
                self.bytes_read += entry.num_bytes
                if self._errors is not None:
                    self._errors[part] = sums
            row = end

    def _rows(self, tensor: TensorSpec, part: str) -> Tensor:
        """A whole part as [out_features, in_features], in its own dtype."""
        rows = self._read(part)
        return rows.t() if tensor.is_transposed else rows

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
                    known |= {self._find(part + "_scale").name, entry.name + "_shape"}
            if rows != tensor.shape[0]:
                raise WrongTensor(
                    f"{' + '.join(tensor.parts)} in {self.checkpoint.folder}: {rows} rows together, the "
                    f"config calls for {tensor.shape[0]}"
                )
        unused = [re.compile(pattern) for pattern in (*DERIVED_TENSORS, *self.tensors.unused)]
        extra = [
            name
            for name in self.checkpoint.entries
            if name not in known and not any(pattern.search(name) for pattern in unused)
        ]
        if extra and not ignore_unexpected:
            entry = self.checkpoint.entries[extra[0]]
            raise UnexpectedTensor(
                f"{entry.file} holds {entry.name}"
                + (f" and {len(extra) - 1} more tensors" if len(extra) > 1 else "")
                + " that this architecture does not use, so its answers might not be the model's. If you "
                "know that they don't matter, pass --ignore-unexpected-tensors"
            )


def _check_part(tensor: TensorSpec, entry: TensorEntry) -> int:
    """Rows that a part adds to its tensor. Raises WrongTensor."""
    # INT8 is always [out_features, in_features].
    is_transposed = tensor.is_transposed and entry.dtype != "I8"
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


def check_quantization(config: dict[str, Any]) -> None:
    """Accept unquantized checkpoints and compressed-tensors INT8 per channel. Raises UnsupportedModel."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return
    method = quantization.get("quant_method")
    groups = quantization.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()]
    if (
        method == "compressed-tensors"
        and weights
        and all(
            scheme.get("num_bits") == 8
            and scheme.get("type") == "int"
            and scheme.get("symmetric", True)
            and scheme.get("strategy") == "channel"
            for scheme in weights
        )
        and quantization.get("format") == "int-quantized"
    ):
        return
    raise UnsupportedModel(
        f"the checkpoint is quantized ({method}, {quantization.get('format', 'no format given')}); Penstock "
        "reads unquantized checkpoints, which it quantizes itself, and compressed-tensors "
        "`int-quantized` with 8 bits per channel. Use the original, unquantized repository"
    )
