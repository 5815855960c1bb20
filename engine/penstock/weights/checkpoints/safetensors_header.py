"""The header of a safetensors file. The format is described at https://github.com/huggingface/safetensors:
eight bytes with the length of the header, the header as JSON, and then the tensors."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import Any

from penstock.errors import CorruptFile
from penstock.memory.ordinary_file import open_bytes, unreadable
from penstock.weights.checkpoints.tensor_entry import DTYPES, TensorEntry

#: Bytes of an element of dtypes that may be in a file, though Penstock does not read them.
OTHER_DTYPE_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "U8": 1, "BOOL": 1}
OTHER_DTYPE_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
#: A longer header is refused, as the safetensors library refuses it.
MAX_HEADER_BYTES = 100 << 20


def read_header(file: Path) -> list[TensorEntry]:
    """All tensors of one file. Raises CorruptFile, which names the file and what is wrong."""
    try:
        with open_bytes(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise CorruptFile(f"{file} does not begin with a safetensors header; download it again")
            raw = stream.read(length)
    except OSError as error:
        raise unreadable(file, error) from error
    try:
        header = json.loads(raw)
        items = [(name, value) for name, value in header.items() if name != "__metadata__"]
        entries = [_entry(file, name, value, 8 + length) for name, value in items]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFile(f"{file} has a malformed safetensors header ({error!r})") from error
    end = max((entry.offset + entry.num_bytes for entry in entries), default=8 + length)
    if end > size:
        raise CorruptFile(
            f"{file} is truncated: its header describes {end} bytes, the file has {size}; download it again"
        )
    check_apart(file, entries)
    return entries


def check_apart(file: Path, entries: list[TensorEntry]) -> None:
    """Raises CorruptFile for tensors that share bytes, as no program writes them."""
    before = None
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.num_bytes)):
        if before is not None and entry.num_bytes and entry.offset < before.offset + before.num_bytes:
            raise CorruptFile(
                f"{file}: tensors {before.name} and {entry.name} lie over one another; download it again"
            )
        before = entry if entry.num_bytes or before is None else before


def _whole(value: Any) -> int:
    if type(value) is not int:  # int() would cut a fraction off, and take true for 1
        raise ValueError(f"{value!r} is no whole number")
    return value


def _entry(file: Path, name: str, value: dict[str, Any], data_start: int) -> TensorEntry:
    dtype, shape = str(value["dtype"]), tuple(map(_whole, value["shape"]))
    begin, end = map(_whole, value["data_offsets"])
    item_bytes = DTYPES[dtype].itemsize if dtype in DTYPES else OTHER_DTYPE_BYTES.get(dtype, 0)
    expected = math.prod(shape) * item_bytes
    if begin < 0 or end < begin or (item_bytes and end - begin != expected) or min(shape, default=0) < 0:
        raise CorruptFile(
            f"{file}: tensor {name} of dtype {dtype} and shape {list(shape)} takes {expected} bytes, but "
            f"the header gives it {end - begin}"
        )
    return TensorEntry(name, file, data_start + begin, dtype, shape, end - begin)
