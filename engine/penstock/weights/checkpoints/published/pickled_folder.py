"""A folder whose weights are files of torch.save: a Hugging Face folder with pytorch_model.bin, the shards of
CPM-1 and CPM-2, or one file of another name."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointNotFound, CorruptFile, UnsupportedModel
from penstock.weights.checkpoints import folder as folders
from penstock.weights.checkpoints.checkpoint import Checkpoint, indexed_weights
from penstock.weights.checkpoints.published import cpm_live, shards
from penstock.weights.checkpoints.published.derived_config import derive
from penstock.weights.checkpoints.published.known_names import SOFT_PROMPT, rules_of
from penstock.weights.checkpoints.tensor_entry import TensorEntry
from penstock.weights.checkpoints.torch_files.torch_file import TorchFile, read_torch_file

logger = logging.getLogger(__name__)

INDEX = "pytorch_model.bin.index.json"


def open_pickled(folder: Path, config: dict[str, Any]) -> Checkpoint:
    """`config` is the folder's config.json, {} if there is none. Its values go before those that the tensors
    tell. Raises CheckpointNotFound, CorruptFile, UnsafeCheckpoint, UnsupportedModel and WrongTensor."""
    ranks = shards.rank_files(folder)
    files = ranks or _files(folder)
    contents = [read_torch_file(file) for file in files]
    if ranks:
        shards.check_number(files, contents)
    tensors = [content.tensors for content in contents] if ranks else [_united(contents)]
    if cpm_live.is_cpm_live(config, tensors[0]) and len(tensors) == 1:
        entries = cpm_live.read(tensors[0])
    else:
        entries = _merged(folder, tensors)
    return Checkpoint(folder, _config(folder, config, entries), entries, pickles=tuple(files))


def _files(folder: Path) -> list[Path]:
    """The files of a folder without shards of ranks."""
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


def _merged(folder: Path, ranks: list[dict[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """The tensors under transformers' names. Raises CorruptFile and UnsupportedModel."""
    rules = rules_of(ranks[0])
    if not rules and len(ranks) > 1:
        raise UnsupportedModel(
            f"{folder} holds shards of a model that Penstock can't merge; it merges those of CPM-1 and "
            "CPM-2. Use a repository with safetensors"
        )
    if rules and SOFT_PROMPT in ranks[0]:
        logger.warning(
            "%s has a soft prompt of %d vectors beside the model; requests can use it after `penstock serve "
            "MODEL --soft-prompt NAME=%s`",
            folder,
            ranks[0][SOFT_PROMPT].shape[0],
            folder,
        )
    return shards.merge(ranks, rules) if rules else ranks[0]


def _config(folder: Path, config: dict[str, Any], entries: dict[str, TensorEntry]) -> dict[str, Any]:
    """Raises CheckpointNotFound where neither a file nor the tensors tell what the model is."""
    is_own = bool(config.get("architectures"))
    found = config if is_own else derive(entries) | config
    if not found.get("architectures"):
        raise folders.refuse_without_config(folder)
    return found
