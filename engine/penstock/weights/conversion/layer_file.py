"""A unit (or embedding, head, or some experts) as one safetensors file. The data begin on a page. Each unit
lies as UnitLayout has it, under the checkpoint's own names, and is read at once. Every reader of safetensors
can read the file."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from penstock.memory.pages import PAGE
from penstock.weights.conversion.unit_files import StoredUnit

WRITE_BYTES = 16 << 20


def header(units: Sequence[StoredUnit], part_rows: dict[str, int]) -> bytes:
    """The bytes before the data: the length of the JSON in eight bytes, the JSON, and spaces up to a whole
    page.

    `part_rows` has the number of rows of each part, for tensors of several parts.
    """
    entries: dict[str, object] = {}
    end = 0
    for array in (array for unit in units for array in unit.arrays()):
        component = array.component
        rows = part_rows.get(array.part, array.tensor.shape[0])
        shape = [component.shape[0] * rows // array.tensor.shape[0], *component.columns]
        num_bytes = component.item_bytes * math.prod(shape)
        data = {"dtype": component.dtype, "shape": shape, "data_offsets": [end, end + num_bytes]}
        entries[array.name] = data
        end += num_bytes
    assert end == sum(unit.num_file_bytes for unit in units)
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % PAGE)
    return struct.pack("<Q", len(raw)) + raw


def data(unit: StoredUnit, buffer: Tensor) -> Iterator[bytes | memoryview]:
    """What a file has of a unit, from the unit's buffer."""
    stored = memoryview(buffer.numpy().data).cast("B")[: unit.layout.num_stored_bytes]
    yield from (stored[start : start + WRITE_BYTES] for start in range(0, len(stored), WRITE_BYTES))
    yield from (memoryview(scales.view(torch.uint8).numpy().data).cast("B") for scales in unit.scales(buffer))
    if unit.padding:
        yield bytes(unit.num_padding_bytes)


def read(path: Path, buffer: Tensor, offset: int = 0) -> None:
    """Fill `buffer` with the data of a file, from byte `offset` of the data on. Raises OSError."""
    with path.open("rb", buffering=0) as stream:
        stream.seek(8 + int.from_bytes(stream.read(8), "little") + offset)
        left = memoryview(buffer.numpy().data).cast("B")
        while left:
            count = stream.readinto(left)
            if not count:
                raise OSError(f"{path} is too short")
            left = left[count:]
