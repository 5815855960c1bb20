"""A folder whose weights are files of torch.save: a Hugging Face folder with pytorch_model.bin, or one file
of another name. Files of trainings and of other programs are put into transformers' form by the modules that
are named here, and imported when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from penstock.errors import CheckpointNotFound, CorruptFile
from penstock.weights.checkpoints import folder as folders
from penstock.weights.checkpoints.checkpoint import Checkpoint, indexed_weights
from penstock.weights.checkpoints.tensor_entry import TensorEntry
from penstock.weights.checkpoints.torch_files.torch_file import TorchFile, read_torch_file

INDEX = "pytorch_model.bin.index.json"
#: Shards of a training: (folder, config) -> the files and the tensors of all; None if there are none.
_SHARDS = "penstock.cpm.training_files:read_shards"
#: A tensor that files of other programs have, and no other file -> what gives their tensors transformers'
#: names: (folder, config, tensors) -> tensors.
_FOREIGN = dict.fromkeys(
    (
        "transformer.layers.0.attention.query_key_value.weight",
        "encoder.blocks.0.self_attn.self_attn.project.weight",
        "position_bias_dec.relative_attention_bias",
        "segment_embedding.weight",
    ),
    "penstock.cpm.training_files:read_file",
)
#: The config of files that come without one: tensors -> config, {} for a model that is not known.
_CONFIGS = "penstock.cpm.derived_config:derive"


def open_pickled(folder: Path, config: dict[str, Any]) -> Checkpoint:
    """`config` is the folder's config.json, {} if there is none. Its values go before those that the tensors
    tell. Raises CheckpointNotFound, CorruptFile, UnsafeCheckpoint, UnsupportedModel and WrongTensor."""
    files, entries = _shards(folder, config) or _read(folder, config)
    return Checkpoint(folder, _config(folder, config, entries), entries, pickles=tuple(files))


def _shards(folder: Path, config: dict[str, Any]) -> tuple[list[Path], dict[str, TensorEntry]] | None:
    if not any(next(folder.glob(pattern), None) for pattern in folders.RANKS):
        return None
    return resolve_name(_SHARDS)(folder, config)  # type: ignore[no-any-return]


def _read(folder: Path, config: dict[str, Any]) -> tuple[list[Path], dict[str, TensorEntry]]:
    files = _files(folder)
    entries = _united([read_torch_file(file) for file in files])
    place = next((place for sign, place in _FOREIGN.items() if sign in entries), None)
    return files, entries if place is None else resolve_name(place)(folder, config, entries)


def _files(folder: Path) -> list[Path]:
    """The files of a folder without shards."""
    if (folder / INDEX).is_file():
        return indexed_weights(folder, INDEX)
    files = folders.pickles(folder)
    if len(files) > 1 and not all(folders.BIN_PART.fullmatch(file.name) for file in files):
        names = ", ".join(file.name for file in files[:8])
        raise CheckpointNotFound(
            f"{folder} has {len(files)} files that could be the model: {names}. Leave one of "
            "them in the folder"
        )
    return files


def _united(contents: Sequence[TorchFile]) -> dict[str, TensorEntry]:
    """The tensors of files of which each has some. Raises CorruptFile."""
    entries: dict[str, TensorEntry] = {}
    for content in contents:
        for name, entry in content.tensors.items():
            if name in entries:
                raise CorruptFile(
                    f"tensor {name} is in both {entries[name].file} and {entry.file}; remove the file that "
                    "does not belong to this model"
                )
            entries[name] = entry
    return entries


def _config(folder: Path, config: dict[str, Any], entries: dict[str, TensorEntry]) -> dict[str, Any]:
    """Raises CheckpointNotFound where neither a file nor the tensors tell what the model is."""
    if config.get("architectures"):
        return config
    found: dict[str, Any] = resolve_name(_CONFIGS)(entries) | config
    if not found.get("architectures"):
        raise folders.refuse_without_config(folder)
    return found
