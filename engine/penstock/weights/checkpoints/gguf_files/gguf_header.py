"""GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): a header with the model's numbers,
its vocabulary and where each tensor lies, then the tensors. Only headers are read when a file is opened.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

from penstock.errors import CheckpointNotFound, CorruptFile, UnsupportedModel
from penstock.weights.checkpoints.folder import GGUF_PART
from penstock.weights.checkpoints.gguf_files.block_types import BLOCK_TYPES, OTHER_TYPES
from penstock.weights.checkpoints.tensor_entry import DTYPES, TensorEntry

Metadata = dict[str, Any]

VERSIONS = (2, 3)
#: A longer header is refused: vocabularies of 256,000 tokens take 10 to 30 MB.
MAX_HEADER_BYTES = 256 << 20
DEFAULT_ALIGNMENT = 32
#: Metadata types of fixed size, as struct spells them.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
#: Types of plain elements, under the names that safetensors uses.
PLAIN_TYPES = {0: "F32", 1: "F16", 30: "BF16"}


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def read_header(path: Path) -> tuple[Metadata, dict[str, TensorEntry]]:
    """Metadata and tensors under llama.cpp's names, of a file or of all parts of a split file.

    Raises CheckpointNotFound (a part is missing), CorruptFile and UnsupportedModel.
    """
    files = [path]
    if match := GGUF_PART.fullmatch(path.name):
        number = int(match[3])
        files = [path.with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf") for i in range(1, number + 1)]
    metadata: Metadata = {}
    entries: dict[str, TensorEntry] = {}
    for file in files:
        if not file.is_file():
            raise CheckpointNotFound(f"{path} is one of {len(files)} files, and {file.name} is not there")
        found, tensors = _read_file(file)
        metadata = metadata or found
        for entry in tensors:
            if entry.name in entries:
                raise CorruptFile(f"tensor {entry.name} is in {path} twice; download the file again")
            entries[entry.name] = entry
    return metadata, entries


def _read_file(path: Path) -> tuple[Metadata, list[TensorEntry]]:
    size = path.stat().st_size
    with path.open("rb", buffering=1 << 20) as stream:
        reader = _Reader(stream, min(size, MAX_HEADER_BYTES))
        try:
            metadata, tensors = reader.header()
        except (ValueError, OverflowError) as error:
            raise CorruptFile(f"{path} has no readable GGUF header ({error}); download it again") from error
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise CorruptFile(f"{path} is aligned to {alignment} bytes; download it again")
        start = -(-stream.tell() // alignment) * alignment
    entries = [_entry(path, start, *tensor) for tensor in tensors]
    end = max((entry.offset + entry.num_bytes for entry in entries), default=start)
    if end > size:
        raise CorruptFile(
            f"{path} is truncated: its header describes {end} bytes, the file has {size}; download it again"
        )
    return metadata, entries


def _entry(path: Path, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorEntry:
    if dtype := PLAIN_TYPES.get(kind):
        num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
        return TensorEntry(name, path, start + offset, dtype, shape, num_bytes)
    if kind not in BLOCK_TYPES:
        known = (*(block.name for block in BLOCK_TYPES.values()), *PLAIN_TYPES.values())
        raise UnsupportedModel(
            f"{path} holds {name} as {OTHER_TYPES.get(kind, f'type {kind}')}; the types that Penstock reads "
            f"are {', '.join(known)}. Use a file with these types, or the original repository"
        )
    block = BLOCK_TYPES[kind]
    if len(shape) < 2 or shape[-1] % block.num_inputs:
        raise CorruptFile(
            f"{path}: tensor {name} of shape {list(shape)} has no rows of whole blocks of {block.num_inputs}"
        )
    num_bytes = math.prod(shape) // block.num_inputs * block.num_bytes
    return TensorEntry(name, path, start + offset, block.name, shape, num_bytes)


class _Reader:
    """Reads a header front to back. Raises ValueError for bytes that are no header."""

    def __init__(self, stream: BinaryIO, limit: int) -> None:
        """No byte from `limit` on is read."""
        self._stream = stream
        self._left = limit

    def header(self) -> tuple[Metadata, list[tuple[str, tuple[int, ...], int, int]]]:
        """Metadata, and for each tensor its name, shape (rows first), type and offset."""
        if self._bytes(4) != b"GGUF":
            raise ValueError("the file does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version:#x}; known are {VERSIONS}, little-endian")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        metadata: Metadata = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        return metadata, [self._tensor() for _ in range(num_tensors)]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self._string(), self._number("I")
        if num_dimensions > 8:
            raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise ValueError(f"a value of type {kind}")
        kind, count = self._number("I"), self._number("Q")
        if kind == STRING:
            return [self._string() for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"an array of type {kind}")
        item = SCALARS[kind]
        return list(struct.unpack(f"<{count}{item}", self._bytes(count * struct.calcsize(f"<{item}"))))

    def _number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._bytes(struct.calcsize(f"<{kind}")))[0]

    def _string(self) -> str:
        return self._bytes(self._number("Q")).decode("utf-8", errors="replace")

    def _bytes(self, count: int) -> bytes:
        self._left -= count
        found = self._stream.read(count) if self._left >= 0 else b""
        if len(found) != count:
            raise ValueError(
                f"the file ends within its header, or the header has more than {MAX_HEADER_BYTES >> 20} MiB"
            )
        return found
