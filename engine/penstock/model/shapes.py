"""Shapes of models: the footprint by which a plan knows one, and folders of a shape with random weights.
known_shapes.py has the shapes of well-known models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config import WeightBits
from penstock.model.registry import read_spec
from penstock.spec import (
    CROSS,
    NO_EXPERTS,
    ExpertFootprint,
    KVLayout,
    ModelFootprint,
    ModelSpec,
    SharedMatrix,
)
from penstock.weights.conversion import layer_file, whole_file
from penstock.weights.conversion.convert import check_space
from penstock.weights.conversion.converted_config import TIED_HEAD, quantization_config
from penstock.weights.conversion.unit_files import StoredUnit, unit_files
from penstock.weights.formats.priced_formats import elements_by_price
from penstock.weights.split.row_split import can_be_split, row_bytes
from penstock.weights.store import planned_tensors
from penstock.weights.tensors import ModelTensors, TensorSpec, UnitLayout

#: A random model has this many different layers of a form; the others repeat them, which no measurement
#: notices.
NUM_DISTINCT = 2


def footprint(spec: ModelSpec, tensors: ModelTensors, kv_layout: KVLayout | None = None) -> ModelFootprint:
    """The numbers by which the memory plan knows a model; without a layout, with keys and values in
    float16."""
    output, num_encoder_layers, dense = tensors.output_matrix, tensors.num_encoder_layers, tensors.dense_units
    return ModelFootprint(
        layer_bytes=tuple(unit.num_bytes for unit in dense),
        embedding_bytes=UnitLayout.of(tensors.embedding).num_bytes,
        head_bytes=UnitLayout.of(tensors.head).num_bytes,
        kv_bytes_per_token=spec.kv_bytes_per_token(kv_layout),
        layer_elements=sum(_matrix_elements(layer) for layer in tensors.layers[num_encoder_layers:]),
        head_elements=output.num_elements if tensors.has_logits else 0,
        max_position_embeddings=spec.max_position_embeddings,
        hidden_size=spec.hidden_size,
        widest_layer=spec.row_size
        - spec.hidden_size
        + max(
            (tensor.shape[0] for unit in tensors.units for tensor in unit.tensors if tensor.is_matrix),
            default=0,
        ),
        vocab_size=spec.vocab_size,
        shared_head_bytes=UnitLayout.of((output,)).num_bytes if tensors.is_tied else 0,
        ropes=spec.ropes,
        experts=_experts(tensors, spec.num_experts_per_token),
        num_encoder_layers=tensors.num_encoder_units,
        num_cross_units=sum(unit.key.stack == CROSS for unit in dense),
        encoder_elements=sum(_matrix_elements(layer) for layer in tensors.layers[:num_encoder_layers]),
        lower_planes=frozenset(index for index, unit in enumerate(dense) if unit.key.plane is not None),
        formats=elements_by_price(
            tensor for layer in tensors.layers[num_encoder_layers:] for tensor in layer
        ),
        head_formats=elements_by_price((output,)) if tensors.has_logits else (),
        implementation=spec.implementation,
        state_bytes=spec.state_bytes,
        matrices=_matrices(spec, tensors),
        kv_part_bytes=_part_bytes(spec, kv_layout),
        features=spec.features,
        attended_heads=_attended_heads(spec),
    )


def _matrices(spec: ModelSpec, tensors: ModelTensors) -> tuple[tuple[SharedMatrix, ...], ...]:
    """ModelFootprint.matrices. Layers of other people are not shared; nor are those of an encoder: a card
    computes its many tokens while the link brings the next layer. Planes beside an encoder are not shared."""
    has_planes = any(stack.lower_planes for stack in tensors.stacks)
    if (has_planes and tensors.num_encoder_layers) or spec.implementation != "penstock":
        return ()
    layers = [
        () if stack.is_encoder else _shared_matrices(layer, stack.lower_planes[index : index + 1])
        for stack in tensors.stacks
        for index, layer in enumerate(stack.layers)
    ]
    return tuple(layers) if any(layers) else ()


def _shared_matrices(
    layer: tuple[TensorSpec, ...], lower_planes: tuple[tuple[TensorSpec, ...], ...]
) -> tuple[SharedMatrix, ...]:
    """Of one layer and its lower planes, if it has any."""
    lower = {tensor.name: row_bytes(tensor) for tensors in lower_planes for tensor in tensors}
    return tuple(
        SharedMatrix(
            tensor.shape[0], row_bytes(tensor) + lower.get(tensor.name, 0), lower.get(tensor.name, 0)
        )
        for tensor in layer
        if can_be_split(tensor)
    )


def _part_bytes(spec: ModelSpec, kv_layout: KVLayout | None) -> tuple[int, ...]:
    """ModelFootprint.kv_part_bytes"""
    layout, shape = kv_layout or spec.kv_layout("float16"), (spec.num_kv_heads, spec.head_dim)
    return tuple(part.item_bytes * math.prod(part.shape(1, 1, *shape)) for part in layout.parts)


def _attended_heads(spec: ModelSpec) -> tuple[int, int] | None:
    """ModelFootprint.attended_heads: the processor's kernel knows neither latents nor biases."""
    is_known = spec.implementation == "penstock" and not spec.latent_dim and not spec.biases_scores
    return (spec.num_heads, spec.head_dim) if is_known else None


def _experts(tensors: ModelTensors, num_per_token: int) -> ExpertFootprint:
    """The experts of all layers. In a layer, a token passes through `num_per_token` experts."""
    experts = [unit for unit in tensors.units if unit.key.expert is not None]
    if not experts:
        return NO_EXPERTS
    num_layers = len({(unit.key.stack, unit.key.layer) for unit in experts})
    return ExpertFootprint(
        num_bytes=max(unit.num_bytes for unit in experts),
        elements=max(_matrix_elements(unit.tensors) for unit in experts),
        count=len(experts),
        count_per_token=num_layers * num_per_token,
        per_layer=len(experts) // num_layers,
        formats=elements_by_price(experts[0].tensors),
    )


def _matrix_elements(tensors: tuple[TensorSpec, ...]) -> int:
    return sum(tensor.num_elements for tensor in tensors if tensor.is_matrix)


def write_random(
    config: dict[str, Any],
    folder: Path,
    report_progress: Callable[[int, int], None] | None = None,
    weights: WeightBits = "int8",
    group_size: int | None = None,
) -> None:
    """Write a folder as `penstock convert` does, with random weights of this shape and without a tokenizer.
    `weights` and `group_size` are those of EngineConfig.

    Integers cover the whole range, and scales keep activations about as large as in a trained model. Raises
    CapacityError if the disk is too small, CheckpointError if another process is writing there, and
    ConfigError if inputs don't make whole groups.
    """
    family, spec = read_spec(config)
    tensors = planned_tensors(family.model_tensors(spec), config, weights, group_size)
    files = unit_files(tensors)
    total = sum(file.num_bytes for file in files)
    with whole_file.lock(folder):
        check_space(folder, total)
        random = _RandomUnits()
        done = 0
        for index, file in enumerate(files):
            head = layer_file.header(file.units, _part_rows(file.units, spec))
            units = (random.like(unit, index + place) for place, unit in enumerate(file.units))
            whole_file.write(folder / file.name, chain([head], chain.from_iterable(units)))
            done += file.num_bytes
            if report_progress is not None:
                report_progress(done, total)
        config = config | {"quantization_config": quantization_config(tensors)}
        if tensors.is_tied:  # the head that is written for others has random values of its own
            config |= {TIED_HEAD: True}
        whole_file.write_json(folder / "config.json", config)


class _RandomUnits:
    """Units with random values, of which there are NUM_DISTINCT of a form."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._made: dict[object, list[Tensor]] = {}

    def like(self, unit: StoredUnit, number: int) -> Iterator[bytes | memoryview]:
        """What a file has of the unit."""
        form = tuple((each.name, each.shape, each.format) for each in unit.tensors)
        alike = self._made.setdefault(form, [])
        if len(alike) < NUM_DISTINCT:
            alike.append(_random(unit.tensors, self._generator))
        return layer_file.data(unit, alike[number % len(alike)])


def _random(tensors: tuple[TensorSpec, ...], generator: torch.Generator) -> Tensor:
    layout = UnitLayout.of(tensors)
    buffer = torch.empty(layout.num_bytes, dtype=torch.uint8)
    for slot in layout.slots:
        slot.tensor.format.fill_random(slot.arrays(buffer), generator)
    return buffer


def _part_rows(units: tuple[StoredUnit, ...], spec: ModelSpec) -> dict[str, int]:
    """Rows of each part of a fused matrix. Of queries, keys and values, the last two have the rows of
    `num_kv_heads`; the parts of every other matrix are equal."""
    kv, rows = spec.num_kv_heads * spec.head_dim, dict[str, int]()
    for tensor in (tensor for unit in units for tensor in unit.stored):
        num_parts, total = len(tensor.parts), tensor.shape[0]
        sizes = (total - 2 * kv, kv, kv) if num_parts == 3 else (total // num_parts,) * num_parts
        rows |= zip(tensor.parts, sizes, strict=True) if num_parts > 1 else ()
    return rows
