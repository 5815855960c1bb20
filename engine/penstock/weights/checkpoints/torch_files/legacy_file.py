"""The form that torch.save wrote before torch 1.6: five pickles, and after them the storages, each after the
number of its elements."""

from __future__ import annotations

from typing import Any, BinaryIO

from penstock.weights.checkpoints.torch_files.faults import Malformed
from penstock.weights.checkpoints.torch_files.pickle_bytes import PickleBytes
from penstock.weights.checkpoints.torch_files.pickle_machine import PickleMachine, read_pickle
from penstock.weights.checkpoints.torch_files.zip_directory import ZipEntry

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001


def read_legacy(stream: BinaryIO, size: int) -> tuple[Any, dict[str, ZipEntry]]:
    """The content of a file of `size` bytes, and where each storage lies, by its key. Raises Malformed and
    Hostile."""
    # The first pickle of another program's file may be anything; a magic number takes a few bytes.
    if PickleMachine(PickleBytes(stream, limit=64)).run() != MAGIC:
        raise Malformed("it is a pickle that another program than torch.save wrote")
    if read_pickle(stream) != PROTOCOL:
        raise Malformed("it has an unknown version of torch's form")
    system = read_pickle(stream)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise Malformed("its numbers are big-endian; save the model on a little-endian machine")
    machine = PickleMachine(PickleBytes(stream))
    content, keys = machine.run(), read_pickle(stream)
    return content, _places(stream, size, machine, keys)


def _places(stream: BinaryIO, size: int, machine: PickleMachine, keys: Any) -> dict[str, ZipEntry]:
    """The storages lie in the order of `keys`."""
    if not isinstance(keys, list):
        raise Malformed("it has no list of its storages")
    places: dict[str, ZipEntry] = {}
    for key in keys:
        storage = machine.storages.get(key) if isinstance(key, str) else None
        if storage is None or key in places:
            raise Malformed("its list of storages is not that of its tensors")
        num_items, offset = int.from_bytes(stream.read(8), "little", signed=True), stream.tell()
        if num_items != storage.num_items or offset + storage.num_bytes > size:
            raise Malformed(
                f"its data end before its tensors do: it has {size} bytes, and storage {key[:40]!r} ends at "
                f"{offset + storage.num_bytes}"
            )
        places[key] = ZipEntry(key, offset, storage.num_bytes)
        stream.seek(offset + storage.num_bytes)
    return places
