"""WeightStore: a model's units as buffers that are ready to compute with, whatever the checkpoint holds.

A unit is one contiguous buffer (UnitLayout), which its tensors' formats fill some rows at a time, so that
reading a layer takes its own bytes and a few megabytes. Only matrices that the checkpoint holds transposed
(GPT-2's) are read whole, in the checkpoint's dtype, one at a time.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.config import CODE_GROUP_SIZES, WeightBits
from penstock.errors import MALFORMED, ConfigError, InvalidConfig
from penstock.spec import UnitKey
from penstock.weights.checkpoints.checkpoint import Checkpoint
from penstock.weights.checkpoints.quantized.quantization_config import (
    STEPS_KEY,
    check_quantization,
    has_low_codes,
    has_mxfp4_experts,
    has_planes,
    int4_group_size,
    int8_group_sizes,
)
from penstock.weights.file_range import FileRange
from penstock.weights.formats.int4_format import Int4
from penstock.weights.formats.model_formats import (
    as_named,
    as_stored,
    grouped,
    grouped_to_fit,
    in_codes,
    with_experts_in,
)
from penstock.weights.formats.weight_format import Loss
from penstock.weights.layer_weights import LayerWeights
from penstock.weights.tensor_check import check_tensors, with_own_groups, with_whole_groups
from penstock.weights.tensor_source import TensorSource
from penstock.weights.tensors import ModelTensors, TensorSpec, UnitLayout

if TYPE_CHECKING:
    from penstock.weights.weight_facts import WeightFacts


class WeightStore:
    """Reads units of one model from its checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensors: ModelTensors,
        ignore_unexpected: bool = False,
        group_size: int | None = None,
        weights: WeightBits = "int8",
        keeps_planes: bool = True,
    ) -> None:
        """Checks that every tensor is there with its shape and that nothing else is. An unquantized
        checkpoint is quantized to `weights`, with scales per `group_size` inputs (0: per output channel;
        None: as in the files, where these have groups); a quantized checkpoint has its own.
        `keeps_planes`: a checkpoint in planes stays so whatever `weights` says; otherwise it becomes
        INT8, unless `weights` asks for planes.

        Raises MissingTensor, WrongTensor, UnexpectedTensor, UnsupportedModel (a quantization that is not
        ours) and ConfigError (a group size that can't be had).
        """
        self.checkpoint = checkpoint
        self.source = TensorSource(checkpoint, tensors.optional_prefix)
        wanted = quantized_tensors(tensors, checkpoint.config, weights, group_size)
        wanted = with_own_groups(as_stored(wanted, self.source, group_size != 0), group_size)
        self.tensors = _as_planes(wanted, checkpoint.config if keeps_planes else {}, weights)
        self.units = {unit.key: unit for unit in self.tensors.units}
        check_tensors(self.source, self.tensors, ignore_unexpected)

    def keep(self, tensors: ModelTensors) -> None:
        """Have these of the model's tensors only, whose units keep their keys."""
        self.tensors, self.units = tensors, {unit.key: unit for unit in tensors.units}
        self.__dict__.pop("facts", None)

    def close(self) -> None:
        """Close the checkpoint's files."""
        self.checkpoint.close()

    @property
    def num_layers(self) -> int:
        return len(self.tensors.layers)

    @cached_property
    def facts(self) -> WeightFacts:
        """In words for people. After keep(), those of the tensors that were kept."""
        from penstock.weights.weight_facts import WeightFacts

        return WeightFacts.of(self.checkpoint, self.tensors)

    @property
    def bytes_read(self) -> int:
        """Bytes read from the checkpoint so far."""
        return self.source.bytes_read

    @property
    def is_quantized(self) -> bool:
        """Whether the checkpoint is quantized already, in part at least."""
        return any(
            tensor.is_matrix and tensor.format.holds(self.source.entry(part))
            for part, tensor in self.tensors.by_part.items()
        )

    @property
    def lossless_share(self) -> float:
        """The share of the matrices' elements that stay as the checkpoint has them, without loss."""
        elements = {True: 0, False: 0}
        for part, tensor in self.tensors.by_part.items():
            if tensor.is_matrix:
                entry = self.source.entry(part)
                elements[tensor.format.holds(entry)] += math.prod(entry.shape)
        return elements[True] / max(1, sum(elements.values()))

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


def planned_tensors(
    tensors: ModelTensors, config: dict[str, Any], weights: WeightBits, group_size: int | None
) -> ModelTensors:
    """A model's tensors as they will be kept, known by config.json alone. Raises as quantized_tensors()
    does, and InvalidConfig."""
    from penstock.weights.checkpoints.quantized.module_kinds import module_kinds, names_kinds

    try:
        wanted, packed = quantized_tensors(tensors, config, weights, group_size), int4_group_size(config)
    except MALFORMED as error:
        raise InvalidConfig(
            f"the quantization_config of config.json makes no sense ({error!r}); download it again"
        ) from error
    if has_mxfp4_experts(config):
        from penstock.weights.checkpoints.quantized.mxfp4 import Mxfp4

        return with_experts_in(wanted, Int4(Mxfp4.form))
    if names_kinds(config):
        if weights not in CODE_GROUP_SIZES and group_size is None:
            wanted = as_named(wanted, module_kinds(config), has_steps=bool(config.get(STEPS_KEY)))
    elif packed:
        wanted = in_codes(
            wanted, packed, has_steps=check_quantization(config) is None or bool(config.get(STEPS_KEY))
        )
    return _as_planes(wanted, config, weights)


def _as_planes(tensors: ModelTensors, config: dict[str, Any], weights: WeightBits) -> ModelTensors:
    """The same tensors, in planes where EngineConfig's `weights` or the checkpoint's config.json say so."""
    if weights != "planes" and not has_planes(config):
        return tensors
    from penstock.weights.formats.plane_units import in_planes

    return in_planes(tensors)


def quantized_tensors(
    tensors: ModelTensors, config: dict[str, Any], weights: WeightBits, group_size: int | None
) -> ModelTensors:
    """A model's tensors as EngineConfig's `weights` and `group_size` want them, or as a quantized checkpoint
    has its INT8; its 4 bits are known when the files are read. Raises ConfigError if the two differ, and
    UnsupportedModel."""
    own, packed = check_quantization(config), int4_group_size(config)
    if own is None:
        if weights in CODE_GROUP_SIZES:
            packed = group_size or CODE_GROUP_SIZES[weights]
            return with_whole_groups(
                in_codes(tensors, packed, weights=weights), f"leave out --weights {weights}"
            )
        if group_size:
            return with_whole_groups(grouped(tensors, group_size), "leave out --group-size")
        return tensors
    if (
        group_size not in (None, own, packed or own)
        or (weights == "int4" and not packed)
        or (weights in ("int3", "int2") and not has_low_codes(config, weights))
        or (weights == "planes" and packed)
    ):
        scales = f"{packed or own} inputs" if packed or own else "output channel"
        raise ConfigError(
            f"the checkpoint is {'in codes' if packed else 'INT8'} already, with scales per {scales}; "
            "--weights int4, int3 or int2 and --group-size need the unquantized checkpoint from which this "
            "one was made, --weights planes that one or one in INT8"
        )
    if len(sizes := int8_group_sizes(config) - {0}) > 1:
        return grouped_to_fit(tensors, sizes)  # as_stored() looks at the scales of each matrix
    return with_whole_groups(grouped(tensors, own), "download the checkpoint again") if own else tensors
