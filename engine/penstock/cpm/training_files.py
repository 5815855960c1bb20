"""Files of torch.save that trainings and other programs wrote: shards of CPM-1 and CPM-2, ModelCenter's
CPM-2, CPM-Live's CPM-Ant. Their tensors get transformers' names."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from penstock.cpm import cpm_live, shards
from penstock.cpm.known_names import SOFT_PROMPT, rules_of
from penstock.errors import UnsupportedModel
from penstock.weights.checkpoints.tensor_entry import TensorEntry
from penstock.weights.checkpoints.torch_files.torch_file import read_torch_file

logger = logging.getLogger(__name__)
Tensors = dict[str, TensorEntry]


def read_shards(folder: Path, config: dict[str, Any]) -> tuple[list[Path], Tensors] | None:
    """The files of all ranks, and their tensors, merged; None if there are none. Raises CheckpointNotFound,
    CorruptFile, UnsafeCheckpoint and UnsupportedModel."""
    files = shards.rank_files(folder)
    if not files:
        return None
    contents = [read_torch_file(file) for file in files]
    shards.check_number(files, contents)
    tensors = [content.tensors for content in contents]
    return files, read_file(folder, config, tensors[0]) if len(tensors) == 1 else _merged(folder, tensors)


def read_file(folder: Path, config: dict[str, Any], tensors: Tensors) -> Tensors:
    """The tensors of a file that has all. Raises CorruptFile."""
    if cpm_live.is_cpm_live(config, tensors):
        return cpm_live.read(tensors)
    return _merged(folder, [tensors])


def _merged(folder: Path, ranks: list[Tensors]) -> Tensors:
    """Raises CorruptFile and UnsupportedModel."""
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
