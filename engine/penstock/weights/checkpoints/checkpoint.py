"""A Hugging Face folder as a map: tensor name -> file, offset, dtype, shape. Reads ranges of tensors
into memory of its own choosing; knows nothing of layers or quantization.

Only headers are read when a checkpoint is opened, and never a file through mmap: pages of a mapped
checkpoint count as this process's memory, and it may be larger than that. The safetensors format is
described at https://github.com/huggingface/safetensors: eight bytes with the header's length, a JSON
header, and the tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import (
    CheckpointNotFound,
    CorruptFile,
    MissingTensor,
    WrongTensor,
)
from penstock.weights.checkpoints import folder as folders

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
}
#: Sizes of dtypes that may stand in a file without our reading them.
OTHER_DTYPE_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "U8": 1, "BOOL": 1}
OTHER_DTYPE_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1}
#: A header beyond this is not one (the safetensors library refuses it too).
MAX_HEADER_BYTES = 100 << 20
#: Of each tensor, for a checkpoint's fingerprint: a disk reads no less in the same time.
SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies."""

    name: str
    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    #: Where other bytes lie there than `dtype` and `shape` say: makes rows start:stop of them.
    decode: Callable[[Checkpoint, int, int], Tensor] | None = None


class Checkpoint:
    """An opened folder. Close it (or use `with`) to give back its file descriptors."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        entries: dict[str, TensorEntry],
        idle: frozenset[str] = frozenset(),
        requantized: str = "",
    ) -> None:
        """`folder` may be a file that holds everything. `idle` are tensors that change nothing, whether the
        model knows them or not; `requantized` says in which integers, which can't be kept, it was stored."""
        self.folder = folder
        self.config = config
        self.entries = entries
        self.idle = idle
        self.requantized = requantized
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read config.json and every header.

        Raises CheckpointNotFound, UnsafeCheckpoint (pickles only) and CorruptFile.
        """
        config = read_config(folder)
        entries: dict[str, TensorEntry] = {}
        for file in _weight_files(folder):
            for entry in read_header(file):
                if entry.name in entries:
                    raise CorruptFile(
                        f"tensor {entry.name} stands in both {entries[entry.name].file} and {file}; "
                        "remove the file that does not belong to this model"
                    )
                entries[entry.name] = entry
        return cls(folder, config, entries)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    @property
    def num_bytes(self) -> int:
        """Of all tensors together."""
        return sum(entry.num_bytes for entry in self.entries.values())

    def fingerprints(self) -> dict[str, list[Any]]:
        """Of each weight file, by name, its size in bytes and a checksum of its header and of a piece from
        the middle of each tensor: tells models of the same shape apart, without reading them, wherever they
        lie and whenever they were copied. Raises CorruptFile."""
        files: dict[Path, list[TensorEntry]] = {}
        for entry in self.entries.values():
            files.setdefault(entry.file, []).append(entry)
        return {file.name: _fingerprint(file, files[file]) for file in sorted(files)}

    def entry(self, name: str) -> TensorEntry:
        """Raises MissingTensor."""
        if name not in self.entries:
            raise MissingTensor(
                f"{self.folder} has no tensor {name}, which its config.json calls for; the download may "
                "be incomplete (is a shard missing?) or the config may belong to another model"
            )
        return self.entries[name]

    def read_rows(self, name: str, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Rows start:stop along the tensor's first axis, in its own dtype; in `out` if it is given.

        Raises MissingTensor, WrongTensor (a dtype that we don't compute with) and CorruptFile (the
        file ended early).
        """
        entry = self.entry(name)
        if entry.decode is not None:
            rows = entry.decode(self, start, stop)
            return rows if out is None else out.copy_(rows)
        if entry.dtype not in DTYPES:
            raise WrongTensor(
                f"tensor {name} in {entry.file} has dtype {entry.dtype}; Penstock reads "
                f"{', '.join(DTYPES)}: use the original, unquantized checkpoint"
            )
        row_bytes = entry.num_bytes // entry.shape[0] if entry.shape else entry.num_bytes
        if out is None:
            out = torch.empty((stop - start, *entry.shape[1:]), dtype=DTYPES[entry.dtype])
        self._read_into(_bytes_of(out), entry, start * row_bytes)
        return out

    def read(self, name: str) -> Tensor:
        """A whole tensor in its own dtype."""
        entry = self.entry(name)
        return self.read_rows(name, 0, entry.shape[0] if entry.shape else 1)

    def read_ahead(self, name: str, start: int, stop: int) -> None:
        """Have the system fetch rows start:stop (as far as there are any) while something else is done; not
        where rows have to be made of other bytes. Raises MissingTensor and CorruptFile."""
        entry = self.entry(name)
        stop = min(stop, entry.shape[0])
        if start < stop and entry.decode is None:
            row_bytes = entry.num_bytes // entry.shape[0]
            offset, length = entry.offset + start * row_bytes, (stop - start) * row_bytes
            os.posix_fadvise(self._descriptor(entry.file), offset, length, os.POSIX_FADV_WILLNEED)

    def read_stored(self, entry: TensorEntry, start: int, stop: int) -> Tensor:
        """Bytes start:stop of what lies there, uint8. Raises CorruptFile."""
        stored = torch.empty(stop - start, dtype=torch.uint8)
        self._read_into(_bytes_of(stored), entry, start)
        return stored

    def read_columns(self, entry: TensorEntry, start: int, stop: int) -> Tensor:
        """Bytes start:stop of each row of what lies there, uint8 [entry.shape[0], stop - start]. Raises
        CorruptFile."""
        row_bytes = entry.num_bytes // entry.shape[0]
        # Row by row the system would not read ahead.
        descriptor = self._descriptor(entry.file)
        os.posix_fadvise(descriptor, entry.offset, entry.num_bytes, os.POSIX_FADV_WILLNEED)
        stored = torch.empty((entry.shape[0], stop - start), dtype=torch.uint8)
        for row, part in enumerate(stored):
            self._read_into(_bytes_of(part), entry, row * row_bytes + start)
        return stored

    def _descriptor(self, file: Path) -> int:
        with self._lock:  # several threads read
            if file not in self._descriptors:
                try:
                    self._descriptors[file] = os.open(file, os.O_RDONLY)
                except OSError as error:
                    raise CorruptFile(f"{file} can't be opened any more: {error.strerror}") from error
            return self._descriptors[file]

    def _read_into(self, view: memoryview, entry: TensorEntry, start: int) -> None:
        descriptor, done = self._descriptor(entry.file), 0
        while done < len(view):
            try:
                count = os.preadv(descriptor, [view[done:]], entry.offset + start + done)
            except OSError as error:
                raise CorruptFile(
                    f"reading tensor {entry.name} from {entry.file} failed: {error.strerror}"
                ) from error
            if count == 0:
                raise CorruptFile(
                    f"{entry.file} ends within tensor {entry.name}; it was cut after it was opened: "
                    "download it again"
                )
            done += count


def _fingerprint(file: Path, entries: list[TensorEntry]) -> list[Any]:
    checksum = hashlib.sha256()
    try:
        with file.open("rb", buffering=0) as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # read nothing ahead
            checksum.update(stream.read(min(entry.offset for entry in entries)))
            for entry in sorted(entries, key=lambda entry: entry.offset):
                stream.seek(entry.offset + entry.num_bytes // 2)
                checksum.update(stream.read(min(SAMPLE_BYTES, entry.num_bytes - entry.num_bytes // 2)))
            return [os.fstat(stream.fileno()).st_size, checksum.hexdigest()]
    except OSError as error:
        raise CorruptFile(f"{file} can't be read: {error.strerror}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises CheckpointNotFound, UnsupportedModel (an adapter) and CorruptFile."""
    if not folder.is_dir():
        raise CheckpointNotFound(
            f"{folder} is not a folder. Give a Hugging Face model folder, a hub repository as "
            '"owner/name", or "demo"'
        )
    path = folder / "config.json"
    if not path.is_file():
        folders.check_adapter(folder)
        raise folders.refuse_without_config(folder)
    return read_json(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CorruptFile."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CorruptFile(f"{path} is not readable JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise CorruptFile(f"{path} holds a JSON {type(content).__name__} instead of an object")
    return content


def read_bytes(path: Path) -> bytes:
    """A small file. Raises CorruptFile."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CorruptFile(f"{path} can't be read: {error.strerror}") from error


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those that its index names, or all there are."""
    folders.check_adapter(folder)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CorruptFile(f"{index} has no weight_map; download it again")
        files = sorted({folder / str(name) for name in weight_map.values()})
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise CheckpointNotFound(
                f"{folder} lacks {len(missing)} of the {len(files)} weight files that {index.name} names: "
                f"{', '.join(missing[:5])}; finish the download"
            )
        return files
    return folders.unindexed_weights(folder)


def read_header(file: Path) -> list[TensorEntry]:
    """All tensors of one file. Raises CorruptFile, naming the file and what is wrong with it."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise CorruptFile(f"{file} does not begin with a safetensors header; download it again")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        items = [(name, value) for name, value in header.items() if name != "__metadata__"]
        entries = [_entry(file, name, value, 8 + length) for name, value in items]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptFile(f"{file} has a malformed safetensors header ({error!r})") from error
    end = max((entry.offset + entry.num_bytes for entry in entries), default=8 + length)
    if end > size:
        raise CorruptFile(
            f"{file} is truncated: its header describes {end} bytes, the file has {size}; download it again"
        )
    return entries


def _entry(file: Path, name: str, value: dict[str, Any], data_start: int) -> TensorEntry:
    dtype, shape = str(value["dtype"]), tuple(int(size) for size in value["shape"])
    begin, end = (int(offset) for offset in value["data_offsets"])
    item_bytes = DTYPES[dtype].itemsize if dtype in DTYPES else OTHER_DTYPE_BYTES.get(dtype, 0)
    expected = math.prod(shape) * item_bytes
    if begin < 0 or end < begin or (item_bytes and end - begin != expected) or min(shape, default=0) < 0:
        raise CorruptFile(
            f"{file}: tensor {name} of dtype {dtype} and shape {list(shape)} takes {expected} bytes, but "
            f"the header gives it {end - begin}"
        )
    return TensorEntry(name, file, data_start + begin, dtype, shape, end - begin)


def _bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous tensor's memory."""
    return memoryview((tensor.view(torch.uint8) if tensor.dim() else tensor).numpy().data).cast("B")
