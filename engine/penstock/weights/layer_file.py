"""One stack of tensors as one safetensors file that is read at once: the data begin on a page and lie as
LayerLayout has them, under the checkpoint's own names. Anything that reads safetensors reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path

from torch import Tensor

from penstock.memory.direct_io import PAGE
from penstock.spec import LayerLayout, TensorSpec
from penstock.weights.store import stored_parts

WRITE_BYTES = 16 << 20
#: Of the data, buffers as they are; SHA-256 is what processors have instructions for.
CHECKSUM = "sha256"


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


def write(path: Path, head: bytes, buffer: Tensor) -> str:
    """Write a file under a temporary name, wait until it is on the disk, and give it its own name; returns
    the checksum of the data. Raises OSError; a file called `path` is whole, whatever happens."""
    temporary = path.with_name(path.name + ".part")
    data = memoryview(buffer.numpy().data).cast("B")
    checksum = hashlib.new(CHECKSUM)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        try:
            _write_all(descriptor, memoryview(head))
            for start in range(0, len(data), WRITE_BYTES):
                piece = data[start : start + WRITE_BYTES]
                _write_all(descriptor, piece)
                checksum.update(piece)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return checksum.hexdigest()


def data_checksum(path: Path) -> str:
    """The checksum of what follows the header. Raises OSError."""
    checksum = hashlib.new(CHECKSUM)
    with path.open("rb", buffering=0) as stream:
        stream.seek(8 + int.from_bytes(stream.read(8), "little"))
        while piece := stream.read(WRITE_BYTES):
            checksum.update(piece)
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return checksum.hexdigest()


def write_json(path: Path, content: object) -> None:
    """Replace a JSON file as a whole: a reader, and whoever comes after a crash, sees the old or the new."""
    temporary = path.with_name(path.name + ".part")
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=2)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in it last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]
