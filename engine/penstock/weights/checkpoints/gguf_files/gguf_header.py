"""The tensors of GGUF files: where each lies, and in which type."""

from __future__ import annotations

import math
from pathlib import Path

from penstock.errors import CorruptFile, UnsupportedModel
from penstock.gguf_file import Metadata, Part, read_parts
from penstock.weights.checkpoints.gguf_files.block_types import BLOCK_TYPES, OTHER_TYPES
from penstock.weights.checkpoints.safetensors_header import check_apart
from penstock.weights.checkpoints.tensor_entry import ARRAY_DTYPES, TensorEntry

DEFAULT_ALIGNMENT = 32
#: Types of plain elements, under the names that safetensors uses.
PLAIN_TYPES = {0: "F32", 1: "F16", 26: "I32", 30: "BF16"}


def read_header(path: Path) -> tuple[Metadata, dict[str, TensorEntry]]:
    """Metadata and tensors under llama.cpp's names, of a file or of all parts of a split file, of which
    `path` is one.

    Raises CheckpointNotFound (a part is missing), CorruptFile and UnsupportedModel.
    """
    metadata: Metadata = {}
    entries: dict[str, TensorEntry] = {}
    for part in read_parts(path):
        metadata = metadata or part.metadata
        for entry in _entries(part):
            if entry.name in entries:
                raise CorruptFile(f"tensor {entry.name} is in {path} twice; download the file again")
            entries[entry.name] = entry
    return metadata, entries


def _entries(part: Part) -> list[TensorEntry]:
    path, size = part.path, part.path.stat().st_size
    alignment = part.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise CorruptFile(f"{path} is aligned to {alignment} bytes; download it again")
    start = -(-part.end // alignment) * alignment
    entries = [_entry(path, start, *tensor) for tensor in part.tensors]
    end = max((entry.offset + entry.num_bytes for entry in entries), default=start)
    if end > size:
        raise CorruptFile(
            f"{path} is truncated: its header describes {end} bytes, the file has {size}; download it again"
        )
    check_apart(path, entries)
    return entries


def _entry(path: Path, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorEntry:
    if dtype := PLAIN_TYPES.get(kind):
        num_bytes = math.prod(shape) * ARRAY_DTYPES[dtype].itemsize
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
