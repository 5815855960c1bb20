"""Folders of a model's shape with random weights. known_shapes.py has the shapes of well-known models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config import CODE_GROUP_SIZES, WeightBits
from penstock.model.registry import read_spec
from penstock.spec import ModelSpec
from penstock.weights.checkpoints.own_head import TIED_HEAD
from penstock.weights.conversion import layer_file, whole_file
from penstock.weights.conversion.convert import check_space
from penstock.weights.conversion.converted_config import quantization_config
from penstock.weights.conversion.unit_files import StoredUnit, unit_files
from penstock.weights.store import planned_tensors
from penstock.weights.tensors import TensorSpec, UnitLayout

#: A random model has this many different layers of a form; the others repeat them, which no measurement
#: notices.
NUM_DISTINCT = 2


def write_random(
    config: dict[str, Any],
    folder: Path,
    report_progress: Callable[[int, int], None] | None = None,
    weights: WeightBits = "int8",
    group_size: int | None = None,
) -> None:
    """Write a folder as `penstock convert` does, with random weights of this shape and without a tokenizer;
    with a head of multi-token prediction, if the config tells of one. `weights` and `group_size` are those of
    EngineConfig.

    Integers cover the whole range, and scales keep activations about as large as in a trained model. Raises
    CapacityError if the disk is too small, CheckpointError if another process is writing there, and
    ConfigError if inputs don't make whole groups.
    """
    family, spec = read_spec(config)
    tensors = planned_tensors(family.model_tensors(spec), config, weights, group_size)
    guessing = family.mtp_spec(spec, None)
    if guessing is not None:
        own = group_size if weights not in CODE_GROUP_SIZES else None
        tensors = replace(tensors, mtp=planned_tensors(family.model_tensors(guessing), config, "int8", own))
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
