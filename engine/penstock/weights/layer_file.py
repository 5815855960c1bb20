"""One stack of tensors as one safetensors file that is read at once: the data begin on a page and lie as
LayerLayout has them, under the checkpoint's own names. Anything that reads safetensors reads it.
"""

from __future__ import annotations

import json
import struct
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.memory.direct_io import PAGE
from penstock.spec import LayerLayout, TensorSpec
from penstock.weights import whole_file
from penstock.weights.store import stored_parts

WRITE_BYTES = 16 << 20


def header(tensors: tuple[TensorSpec, ...], part_rows: dict[str, int]) -> bytes:
    """What stands before the data: its length in eight bytes, the JSON, and spaces up to a whole page.

    `part_rows` are the rows of each checkpoint tensor of a matrix or vector of several parts.
    """
    by_part = {part: tensor for tensor in tensors for part in tensor.parts}
    entries: dict[str, object] = {}
    end = 0
    for name, dtype in stored_parts(tensors):
        tensor = by_part.get(name) or by_part[name.removesuffix("_scale")]
        rows = part_rows.get(name.removesuffix("_scale"), tensor.shape[0])
        is_scale = name not in by_part
        shape = [rows, *(tensor.scale_shape[1:] or (1,))] if is_scale else [rows, *tensor.shape[1:]]
        num_bytes = (1 if dtype == "I8" else 4) * (shape[0] * (shape[1] if len(shape) > 1 else 1))
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    assert end == LayerLayout.of(tensors).num_bytes
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % PAGE)
    return struct.pack("<Q", len(raw)) + raw


def write(path: Path, head: bytes, buffer: Tensor) -> dict[str, Any]:
    """whole_file.write() of header and data."""
    data = memoryview(buffer.numpy().data).cast("B")
    pieces = (data[start : start + WRITE_BYTES] for start in range(0, len(data), WRITE_BYTES))
    return whole_file.write(path, chain([head], pieces))


def read(path: Path, buffer: Tensor) -> None:
    """The data of a file that is whole. Raises OSError."""
    with path.open("rb", buffering=0) as stream:
        stream.seek(8 + int.from_bytes(stream.read(8), "little"))
        left = memoryview(buffer.numpy().data).cast("B")
        while left:
            count = stream.readinto(left)
            if not count:
                raise OSError(f"{path} is too short")
            left = left[count:]
