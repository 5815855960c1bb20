"""Checkpoint: a Hugging Face folder as a map from a tensor's name to file, offset, dtype and shape. A
checkpoint reads ranges of tensors into ordinary memory, and knows nothing of layers or quantization.

Only headers are read when a checkpoint is opened. No file is ever read through mmap: the pages of a mapped
file count as this process's memory, and a checkpoint may be larger than the memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError, CheckpointNotFound, CorruptFile, MissingTensor, WrongTensor
from penstock.memory.ordinary_file import FileIdentity, identity_of, open_bytes, unreadable
from penstock.weights.checkpoints import folder as folders
from penstock.weights.checkpoints.open_files import OpenFiles
from penstock.weights.checkpoints.safetensors_header import read_header
from penstock.weights.checkpoints.tensor_entry import DTYPES, TensorEntry

INDEX = "model.safetensors.index.json"
#: The file that makes a folder a model, and so is written last by a conversion.
CONFIG = "config.json"
#: The files of a converted folder, with checksums.
MANIFEST = "penstock.json"


class Checkpoint:
    """An opened folder. Call close() (or use `with`) to give back the file descriptors."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        entries: dict[str, TensorEntry],
        idle: frozenset[str] = frozenset(),
        requantized: str = "",
        pickles: tuple[Path, ...] = (),
        file_type: str = "",
    ) -> None:
        """`folder` may be a file that holds everything. `idle` are tensors that change nothing, whether the
        model knows them or not. `requantized` names the integers of the files where they can't be kept, so
        that the weights are quantized again; "" otherwise. `pickles` are the files that torch.save wrote.
        `file_type` is llama.cpp's name for the types of a GGUF file (Q4_K_M); "" otherwise."""
        self.folder = folder
        self.config = config
        self.entries = entries
        self.idle = idle
        self.requantized = requantized
        self.pickles = pickles
        self.file_type = file_type
        #: What the files were before their headers were read.
        self.identities: dict[Path, FileIdentity] = {}
        self._files = OpenFiles(self.identities)

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read config.json and every header.

        Raises CheckpointNotFound, UnsafeCheckpoint (pickles only) and CorruptFile.
        """
        config = read_config(folder)
        entries: dict[str, TensorEntry] = {}
        for file in weight_files(folder):
            for entry in read_header(file):
                if entry.name in entries:
                    raise CorruptFile(
                        f"tensor {entry.name} is in both {entries[entry.name].file} and {file}; "
                        "remove the file that does not belong to this model"
                    )
                entries[entry.name] = entry
        return cls(folder, config, entries)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._files.close()

    def watch(self, before: Mapping[Path, FileIdentity]) -> None:
        """From now on nothing is read of a file that is not what it was `before`; files that are not named
        there count as they are now. Raises CorruptFile."""
        entries = self.entries.values()
        paths = {source.file for entry in entries for source in entry.sources or (entry,)}
        paths.update(path for path in before if path.parent == self.folder and path.name == "config.json")
        self.identities.update({path: before.get(path) or identity_of(path) for path in paths})

    def check_unchanged(self) -> None:
        """Raises CorruptFile if a file was changed, or another one has taken its place, since watch()."""
        for path, identity in self.identities.items():
            identity.check(path, identity_of(path))

    def entry(self, name: str) -> TensorEntry:
        """Where a tensor lies. Raises MissingTensor."""
        if name not in self.entries:
            raise MissingTensor(
                f"{self.folder} has no tensor {name}, which its config.json calls for; the download may "
                "be incomplete (is a shard missing?) or the config may belong to another model"
            )
        return self.entries[name]

    def read_rows(self, name: str, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Rows start:stop along the tensor's first axis, in the dtype of the file; in `out` if that is given.

        Raises MissingTensor, WrongTensor (a dtype that we don't compute with) and CorruptFile (the
        file ended early).
        """
        entry = self.entry(name)
        if entry.dtype not in DTYPES:
            raise WrongTensor(
                f"tensor {name} in {entry.file} has dtype {entry.dtype}; Penstock reads "
                f"{', '.join(DTYPES)}: use the original, unquantized checkpoint"
            )
        if entry.decode is not None:
            rows = entry.decode(self, start, stop)
            return rows if out is None else out.copy_(rows)
        row_bytes = entry.num_bytes // entry.shape[0] if entry.shape else entry.num_bytes
        if out is None:
            out = torch.empty((stop - start, *entry.shape[1:]), dtype=DTYPES[entry.dtype])
        self._files.read_into(out, entry, start * row_bytes)
        return out

    def read(self, name: str) -> Tensor:
        """A whole tensor in the dtype of the file."""
        entry = self.entry(name)
        return self.read_rows(name, 0, entry.shape[0] if entry.shape else 1)

    def read_ahead(self, name: str, start: int, stop: int) -> None:
        """Have the system fetch rows start:stop (as far as there are any) while something else is done. Does
        nothing for a tensor whose rows are decoded. Raises MissingTensor and CorruptFile."""
        entry = self.entry(name)
        stop = min(stop, entry.shape[0])
        if start < stop and entry.decode is None:
            row_bytes = entry.num_bytes // entry.shape[0]
            self._files.will_need(entry.file, entry.offset + start * row_bytes, (stop - start) * row_bytes)

    def read_stored(self, entry: TensorEntry, start: int, stop: int) -> Tensor:
        """Bytes start:stop of a tensor as the file has them, uint8. Raises CorruptFile."""
        stored = torch.empty(stop - start, dtype=torch.uint8)
        self._files.read_into(stored, entry, start)
        return stored

    def read_columns(self, entry: TensorEntry, start: int, stop: int) -> Tensor:
        """Bytes start:stop of each row as the file has them, uint8 [entry.shape[0], stop - start]. Raises
        CorruptFile."""
        row_bytes = entry.num_bytes // entry.shape[0]
        # With a small read for each row, the system would not read ahead on its own.
        self._files.will_need(entry.file, entry.offset, entry.num_bytes)
        stored = torch.empty((entry.shape[0], stop - start), dtype=torch.uint8)
        for row, part in enumerate(stored):
            self._files.read_into(part, entry, row * row_bytes + start)
        return stored


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json. Raises CheckpointNotFound, UnsupportedModel (an adapter) and
    CorruptFile."""
    if not folder.is_dir():
        raise CheckpointNotFound(
            f"{folder} is not a folder. Give a Hugging Face model folder, a hub repository as "
            '"owner/name", "demo" or "demo-moe"'
        )
    path = folder / "config.json"
    if not path.is_file():
        folders.check_adapter(folder)
        raise folders.refuse_without_config(folder)
    return read_json(path)


def check_finished(folder: Path) -> None:
    """Raises CheckpointError for a folder whose conversion was stopped."""
    if (folder / MANIFEST).is_file() and not (folder / CONFIG).is_file():
        source = read_json(folder / MANIFEST).get("source", {}).get("folder", "MODEL")
        raise CheckpointError(
            f"the conversion to {folder} is not finished; run `penstock convert {source} {folder}` again, "
            "with the same flags; it goes on where the last run stopped"
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CorruptFile."""
    try:
        content = json.loads(read_bytes(path).decode())
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path} is not readable JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise CorruptFile(f"{path} holds a JSON {type(content).__name__} instead of an object")
    return content


def read_bytes(path: Path) -> bytes:
    """The content of a small file. Raises CorruptFile."""
    try:
        with open_bytes(path) as stream:
            return stream.read()
    except OSError as error:
        raise unreadable(path, error) from error


def indexed_weights(folder: Path, index_name: str) -> list[Path]:
    """The files that an index names. Raises CorruptFile, and CheckpointNotFound if one is missing."""
    index = folder / index_name
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFile(f"{index} has no weight_map; download it again")
    for name in weight_map.values():
        if not folders.is_file_name(name):
            raise CorruptFile(
                f"{index} names a file {name!r:.200}, which is none in the model's folder; download it again"
            )
    files = sorted({folder / name for name in weight_map.values()})
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointNotFound(
            f"{folder} lacks {len(missing)} of the {len(files)} weight files that {index.name} names: "
            f"{', '.join(missing[:5])}; finish the download"
        )
    return files


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the files that its index names, or without an index all files."""
    folders.check_adapter(folder)
    if (folder / INDEX).is_file():
        return indexed_weights(folder, INDEX)
    return folders.unindexed_weights(folder)
