"""Shards: the files of one model whose training shared each tensor among several ranks, merged under
transformers' names. One file of one rank is the smallest case."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.cpm.known_names import Found, Rule, Split, apply
from penstock.cpm.merged_rows import Piece, merge_columns, merge_rows
from penstock.errors import CheckpointNotFound, CorruptFile
from penstock.weights.checkpoints.tensor_entry import TensorEntry
from penstock.weights.checkpoints.torch_files.torch_file import TorchFile

#: DeepSpeed's name of the file of one rank.
RANK_FILE = re.compile(r"mp_rank_(\d{2,3})_model_states\.pt")
Tensors = Mapping[str, TensorEntry]


def rank_files(folder: Path) -> list[Path]:
    """The files of the ranks in their order, in a folder or in its only subfolder that has such files. []
    where there are none. Raises CheckpointNotFound if a rank is missing."""
    folders = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    found = [files for each in folders if (files := _rank_files(each))]
    if not found:
        return []
    if len(found) > 1 and found[0][0].parent != folder:
        names = ", ".join(str(files[0].parent) for files in found)
        raise CheckpointNotFound(f"{folder} has several checkpoints; give the path of one of them: {names}")
    return found[0]


def _rank_files(folder: Path) -> list[Path]:
    ranks = {int(match[1]): path for path in folder.iterdir() if (match := RANK_FILE.fullmatch(path.name))}
    if missing := set(range(max(ranks, default=-1))) - ranks.keys():
        raise CheckpointNotFound(
            f"{folder} lacks the file of rank {min(missing)}, and has that of rank {max(ranks)}; finish the "
            "download"
        )
    return [ranks[rank] for rank in sorted(ranks)]


def check_number(files: Sequence[Path], contents: Sequence[TorchFile]) -> None:
    """Raises CheckpointNotFound if the files tell of more ranks than there are files."""
    expected = contents[0].numbers.get("mp_world_size", len(files))
    if expected != len(files):
        raise CheckpointNotFound(
            f"{files[0].parent} has the files of {len(files)} ranks, and {files[0].name} says that there are "
            f"{expected}; finish the download"
        )


def merge(ranks: Sequence[Tensors], rules: tuple[Rule, ...]) -> dict[str, TensorEntry]:
    """The tensors of all ranks together. A tensor that no rule knows keeps its name, and the store says that
    the model does not have it. Raises CorruptFile."""
    merged: dict[str, TensorEntry] = {}
    for name, first in ranks[0].items():
        parts = [rank.get(name) for rank in ranks]
        entries = [part for part in parts if part is not None]
        if len(entries) != len(ranks) or any(entry.shape != first.shape for entry in entries):
            raise CorruptFile(
                f"the ranks' files have {name} in different shapes, or not all of them have it; they may be "
                f"of different checkpoints. Download the files in {first.file.parent} again"
            )
        for entry in _merged(entries, apply(rules, name)):
            if entry.name in merged:
                raise CorruptFile(f"{first.file} has {entry.name} under two names; download it again")
            merged[entry.name] = entry
    return merged


def _merged(entries: Sequence[TensorEntry], found: Found | None) -> Iterator[TensorEntry]:
    """One tensor of all ranks; several for a matrix that is divided."""
    if found is None:
        yield entries[0]
    elif found.split is Split.COLUMNS:
        yield merge_columns(found.names[0], entries)
    elif found.split is Split.ROWS:
        yield from _blocks(entries, found)
    else:
        yield from (replace(entries[0], name=name) for name in found.names)


def _blocks(entries: Sequence[TensorEntry], found: Found) -> Iterator[TensorEntry]:
    """Blocks of rows: block b of the whole tensor is block b of each rank, in the order of the ranks."""
    first = entries[0]
    num_rows = first.shape[0] if first.shape else 0
    if not num_rows or num_rows % found.num_blocks:
        raise CorruptFile(
            f"{first.name} in {first.file} has {num_rows} rows, which are not {found.num_blocks} blocks; "
            "download the file again"
        )
    size = num_rows // found.num_blocks
    blocks = [[Piece(entry, b * size, size) for entry in entries] for b in range(found.num_blocks)]
    if len(found.names) == 1:
        blocks = [[piece for block in blocks for piece in block]]
    for name, pieces in zip(found.names, blocks, strict=True):
        yield merge_rows(name, pieces)
