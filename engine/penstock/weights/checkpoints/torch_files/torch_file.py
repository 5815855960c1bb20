"""A file that torch.save wrote, as a map from names to where tensors lie. The file's pickle is interpreted
and never executed (pickle_machine.py); tensors are read later, in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from penstock.errors import CorruptFile, UnsafeCheckpoint, WrongTensor
from penstock.memory.ordinary_file import open_bytes
from penstock.weights.checkpoints.tensor_entry import TensorEntry
from penstock.weights.checkpoints.torch_files.faults import Hostile, Malformed
from penstock.weights.checkpoints.torch_files.legacy_file import read_legacy
from penstock.weights.checkpoints.torch_files.pickle_machine import read_pickle
from penstock.weights.checkpoints.torch_files.pickled_names import OTHER_TENSORS, Inert
from penstock.weights.checkpoints.torch_files.stored_tensor import Storage, StoredTensor, item_bytes
from penstock.weights.checkpoints.torch_files.strided_rows import StridedRows
from penstock.weights.checkpoints.torch_files.zip_directory import ZipEntry, read_directory

#: Keys under which frameworks keep a model's tensors beside other things.
WRAPPERS = ("state_dict", "module", "model", "model_state_dict")
#: Dicts within dicts, such as Megatron's: "language_model", "encoder", ...
MAX_DEPTH = 12
#: Names of tensors in a file.
MAX_TENSORS = 200_000
_ZIP = b"PK\x03\x04"


@dataclass
class TorchFile:
    """What a file holds."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    #: Whole numbers beside the tensors, such as DeepSpeed's mp_world_size.
    numbers: dict[str, int] = field(default_factory=dict)


def read_torch_file(file: Path) -> TorchFile:
    """Raises CorruptFile, UnsafeCheckpoint (the pickle asks for what no checkpoint needs) and WrongTensor (a
    tensor that is not stored as plain elements)."""
    try:
        with open_bytes(file) as stream:
            size = file.stat().st_size
            read = read_zip if _begins(stream, _ZIP) else read_legacy
            return _collect(file, *read(stream, size))
    except OSError as error:
        raise CorruptFile(f"{file} can't be read: {error.strerror}") from error
    except Malformed as error:
        raise CorruptFile(
            f"{file} can't be read as a file of torch.save: {error}. Download the file again, or use a "
            "repository with safetensors"
        ) from error
    except Hostile as error:
        raise UnsafeCheckpoint(
            f"{file} {error}. No checkpoint needs that, and the file may be an attack. Nothing of the file "
            "was run. Use another source of the model"
        ) from error


def _begins(stream: BinaryIO, magic: bytes) -> bool:
    found = stream.read(len(magic))
    stream.seek(0)
    return found == magic


def read_zip(stream: BinaryIO, size: int) -> tuple[Any, dict[str, ZipEntry]]:
    """The content of data.pkl, and where each storage lies, by its key."""
    entries = read_directory(stream, size)
    pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise Malformed("the zip file has no data.pkl, or several")
    folder = pickles[0].removesuffix("data.pkl")
    if (order := entries.get(f"{folder}byteorder")) is not None:
        stream.seek(order.offset)
        if stream.read(min(order.num_bytes, 16)) != b"little":
            raise Malformed("its numbers are big-endian; save the model on a little-endian machine")
    prefix = f"{folder}data/"
    places = {name.removeprefix(prefix): entry for name, entry in entries.items() if name.startswith(prefix)}
    stream.seek(entries[pickles[0]].offset)
    return read_pickle(stream), places


def _collect(file: Path, content: Any, places: dict[str, ZipEntry]) -> TorchFile:
    """The tensors of the model under their names: those of the dict under a key of WRAPPERS, or all."""
    found = TorchFile()
    if isinstance(content, dict):
        numbers = ((key, value) for key, value in content.items() if type(value) is int)
        found.numbers = {key: value for key, value in numbers if isinstance(key, str)}
    for name, value in _named(_unwrapped(content)):
        if isinstance(value, StoredTensor):
            if name in found.tensors:
                raise Malformed(f"tensor {name[:200]} is there twice")
            found.tensors[name] = _entry(file, name, value, places)
        elif value.what.startswith(OTHER_TENSORS):
            raise WrongTensor(
                f"tensor {name} in {file} is no tensor of plain elements ({value.what}); Penstock reads "
                "dense tensors: use the original, unquantized checkpoint"
            )
    if not found.tensors:
        what = content.what if isinstance(content, Inert) else f"a {type(content).__name__} without tensors"
        raise Malformed(f"it holds {what}, and no dict of tensors; save the model's state_dict()")
    return found


def _unwrapped(content: Any) -> Any:
    for _ in range(len(WRAPPERS)):
        inside = [content[key] for key in WRAPPERS if content.get(key)] if isinstance(content, dict) else []
        inside = [value for value in inside if isinstance(value, dict)]
        if not inside:
            return content
        content = inside[0]
    return content


def _named(content: Any) -> Iterator[tuple[str, StoredTensor | Inert]]:
    """Tensors and placeholders in dicts, with their names joined by dots. Each dict is gone through once. A
    file may also hold nothing but a tensor."""
    if isinstance(content, StoredTensor):
        yield "tensor", content
    pending, seen, count = [("", content, 0)], set(), 0
    while pending:
        prefix, value, depth = pending.pop()
        if not isinstance(value, dict) or id(value) in seen or depth > MAX_DEPTH:
            continue
        seen.add(id(value))
        for key, inner in value.items():
            name, count = f"{prefix}{key}", count + 1
            if count > MAX_TENSORS or len(name) > 1024:
                raise Malformed("it has too many names of tensors, or too long ones")
            if isinstance(inner, StoredTensor | Inert):
                yield name, inner
            elif isinstance(inner, dict):
                pending.append((f"{name}.", inner, depth + 1))


def _entry(file: Path, name: str, tensor: StoredTensor, places: dict[str, ZipEntry]) -> TensorEntry:
    place = _place(name, tensor.storage, places)
    width = item_bytes(tensor.dtype)
    offset, num_bytes = place.offset + tensor.offset * width, tensor.num_items * width
    if tensor.is_contiguous:
        return TensorEntry(name, file, offset, tensor.dtype, tensor.shape, num_bytes)
    span = TensorEntry(name, file, offset, tensor.dtype, (tensor.extent,), tensor.extent * width)
    rows = StridedRows(span, tensor.shape, tensor.stride)
    return TensorEntry(name, file, offset, tensor.dtype, tensor.shape, span.num_bytes, rows.read)


def _place(name: str, storage: Storage, places: dict[str, ZipEntry]) -> ZipEntry:
    """Where a storage lies. Raises Malformed unless the file has the bytes that the pickle claims."""
    place = places.get(storage.key)
    if place is None:
        raise Malformed(f"the data of tensor {name[:200]} are missing")
    if place.num_bytes != storage.num_bytes:
        raise Malformed(
            f"tensor {name[:200]} should have {storage.num_bytes} bytes of data, and the file has "
            f"{place.num_bytes}"
        )
    return place


def is_torch_file(file: Path) -> bool:
    """Whether a file begins as a zip file, or as a pickle of protocol 2 or later."""
    with open_bytes(file) as stream:
        head = stream.read(4)
    return head == _ZIP or (head[:1] == b"\x80" and len(head) > 1 and 2 <= head[1] <= 5)
