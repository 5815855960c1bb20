"""The tensors of a unit (or of embedding or head) as one safetensors file that is read at once. The data
begin on a page and lie as UnitLayout has them, under the checkpoint's own names. Every reader of safetensors
can read the file."""

from __future__ import annotations

import json
import math
import struct
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.memory.pages import PAGE
from penstock.weights.conversion import whole_file
from penstock.weights.tensors import TensorSpec, UnitLayout, stored_arrays

WRITE_BYTES = 16 << 20


def header(tensors: tuple[TensorSpec, ...], part_rows: dict[str, int]) -> bytes:
    """The bytes before the data: the length of the JSON in eight bytes, the JSON, and spaces up to a whole
    page.

    `part_rows` has the number of rows of each part, for tensors of several parts.
    """
    entries: dict[str, object] = {}
    end = 0
    for array in stored_arrays(tensors):
        component = array.component
        rows = part_rows.get(array.part, array.tensor.shape[0])
        shape = [component.shape[0] * rows // array.tensor.shape[0], *component.columns]
        num_bytes = component.item_bytes * math.prod(shape)
        data = {"dtype": component.dtype, "shape": shape, "data_offsets": [end, end + num_bytes]}
        entries[array.name] = data
        end += num_bytes
    assert end == UnitLayout.of(tensors).num_stored_bytes
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % PAGE)
    return struct.pack("<Q", len(raw)) + raw


def write(path: Path, head: bytes, buffer: Tensor) -> dict[str, Any]:
    """Write header and data; returns what whole_file.write() returns."""
    data = memoryview(buffer.numpy().data).cast("B")
    pieces = (data[start : start + WRITE_BYTES] for start in range(0, len(data), WRITE_BYTES))
    return whole_file.write(path, chain([head], pieces))


def read(path: Path, buffer: Tensor) -> None:
    """Read the data of a whole file into `buffer`. Raises OSError."""
    with path.open("rb", buffering=0) as stream:
        stream.seek(8 + int.from_bytes(stream.read(8), "little"))
        left = memoryview(buffer.numpy().data).cast("B")
        while left:
            count = stream.readinto(left)
            if not count:
                raise OSError(f"{path} is too short")
            left = left[count:]
