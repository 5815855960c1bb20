"""WeightStore: a model's units as buffers that are ready to compute with, whatever the checkpoint holds.

A unit is one contiguous buffer (UnitLayout), which its tensors' formats fill some rows at a time, so that
reading a layer takes its own bytes and a few megabytes. Only matrices that the checkpoint holds transposed
(GPT-2's) are read whole, in the checkpoint's dtype, one at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.spec import UnitKey
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.formats import check_quantization
from penstock.weights.file_range import FileRange
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensor_check import check_tensors
from penstock.weights.tensor_source import TensorSource
from penstock.weights.tensors import ModelTensors, TensorSpec, UnitLayout
from penstock.weights.weight_format import Loss


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
        checkpoint gets scales per `group_size` inputs; a checkpoint in INT8 has its own.

        Raises MissingTensor, WrongTensor, UnexpectedTensor, UnsupportedModel (a quantization that is not
        ours) and ConfigError (a group size that can't be had).
        """
        group_size = _group_size(checkpoint, group_size)
        self.checkpoint = checkpoint
        self.tensors = tensors.grouped(group_size) if group_size else tensors
        self.units = {unit.key: unit for unit in self.tensors.units}
        self.source = TensorSource(checkpoint, tensors.optional_prefix)
        check_tensors(self.source, self.tensors, ignore_unexpected)

    def close(self) -> None:
        """Close the checkpoint's files."""
        self.checkpoint.close()

    @property
    def num_layers(self) -> int:
        return len(self.tensors.layers)

    @property
    def bytes_read(self) -> int:
        """Bytes read from the checkpoint so far."""
        return self.source.bytes_read

    @property
    def is_quantized(self) -> bool:
        """Whether the checkpoint is quantized already, in part at least."""
        return any(
            tensor.is_matrix and tensor.format.holds(self.source.entry(part))
            for tensors in self.tensors.groups
            for tensor in tensors
            for part in tensor.parts
        )

    def contiguous_unit(self, key: UnitKey) -> FileRange | None:
        """contiguous() for a unit."""
        return self.contiguous(self.units[key].tensors)

    def contiguous(self, tensors: tuple[TensorSpec, ...]) -> FileRange | None:
        """FileRange.of() embedding, unit or head."""
        return FileRange.of(self.source, tensors)

    def read_unit(self, key: UnitKey, buffer: Tensor, num_threads: int = 1) -> LayerWeights:
        """Read a unit into `buffer` (uint8, at least the unit's bytes); returns views into the buffer.
        `num_threads` threads quantize a tensor at the same time."""
        return self._fill(self.units[key].layout, buffer, num_threads)

    def read_resident(self, tensors: tuple[TensorSpec, ...]) -> LayerWeights:
        """Read embedding or head into memory of its own."""
        layout = UnitLayout.of(tensors)
        return self._fill(layout, torch.empty(layout.num_bytes, dtype=torch.uint8), num_threads=1)

    def read_with_errors(
        self, tensors: tuple[TensorSpec, ...], buffer: Tensor, num_threads: int = 1
    ) -> dict[str, float]:
        """Read embedding, unit or head into `buffer`; returns the relative error of each part that was
        quantized."""
        losses: dict[str, Loss] = {}
        for slot in UnitLayout.of(tensors).slots:
            losses |= slot.tensor.format.fill(
                self.source, slot.tensor, slot.arrays(buffer), num_threads, True
            )
        return {part: (loss.lost / loss.of) ** 0.5 for part, loss in losses.items() if loss.of > 0}

    def read_exact(self, part: str) -> Tensor:
        """A part of a tensor in float32, in the shape that unquantized checkpoints give it. What is quantized
        is dequantized."""
        exact, entry = self.source.read(part).float(), self.source.entry(part)
        tensor = self.tensors.by_part.get(part)
        is_stored = tensor is not None and tensor.is_matrix and tensor.format.holds(entry)
        if is_stored and tensor is not None:
            exact = tensor.format.dequantize(self.source, part, exact)
        is_turned = is_stored or entry.has_outputs_first
        return exact.t().contiguous() if tensor is not None and tensor.is_transposed and is_turned else exact

    def _fill(self, layout: UnitLayout, buffer: Tensor, num_threads: int) -> LayerWeights:
        for slot in layout.slots:
            slot.tensor.format.fill(self.source, slot.tensor, slot.arrays(buffer), num_threads)
        return LayerWeights.views(layout, buffer)


def _group_size(checkpoint: Checkpoint, wanted: int | None) -> int | None:
    """Inputs that share a scale: the checkpoint's own number where it is INT8, otherwise `wanted`. Raises
    ConfigError if the two differ."""
    own = check_quantization(checkpoint.config)
    if own is None:
        return wanted
    if wanted not in (None, own):
        raise ConfigError(
            f"{checkpoint.folder} is INT8 already, with scales per "
            f"{f'{own} inputs' if own else 'output channel'}; --group-size is for unquantized checkpoints"
        )
    return own
