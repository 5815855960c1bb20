"""CPM-Live's own files of CPM-Ant and CPM-Ant+, as transformers' cpmant has their tensors.

CPM-Live divides what comes out of a matrix, and the rows of an embedding, by the square root of a row's
length each time they are used. transformers has the quotients in its files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.cpm.merged_rows import Piece, merge_rows
from penstock.errors import CorruptFile
from penstock.weights.checkpoints.tensor_entry import DTYPES, TensorEntry

if TYPE_CHECKING:
    from penstock.weights.checkpoints.checkpoint import Checkpoint

#: A tensor of both models, and the soft prompts, which only CPM-Ant has apart from the embedding.
_SIGN, _SOFT_PROMPTS = "segment_embedding.weight", "prompt_embedding.weight"
_EMBEDDING, _BIASES = "input_embedding.weight", "position_bias.relative_attention_bias"


@dataclass(frozen=True)
class DividedRows:
    """A matrix whose elements are divided by the square root of a row's length, in float32."""

    entry: TensorEntry

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> Tensor:
        """Rows start:stop. Raises CorruptFile."""
        rows = self.entry.read_rows(checkpoint, start, stop).to(torch.float32, copy=True)
        return rows.div_(math.sqrt(self.entry.shape[1]))


def is_cpm_live(config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]) -> bool:
    """transformers' bare model has CPM-Ant+'s names, and a config.json that names an architecture."""
    return _SIGN in tensors and (_SOFT_PROMPTS in tensors or not config.get("architectures"))


def read(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors under transformers' names. Raises CorruptFile."""
    found = {name: _divided(entry) for name, entry in tensors.items()}
    if _SOFT_PROMPTS in found:
        parts = [found.get(_EMBEDDING), found.pop(_SOFT_PROMPTS)]
        rows = [Piece(part, 0, part.shape[0]) for part in parts if part is not None and part.shape]
        if len(rows) != len(parts):
            raise CorruptFile(
                f"CPM-Live's file lacks {_EMBEDDING}, or has it without rows; download it again"
            )
        found[_EMBEDDING] = merge_rows(_EMBEDDING, rows)
    return {f"cpmant.{name}": replace(entry, name=f"cpmant.{name}") for name, entry in found.items()}


def _divided(entry: TensorEntry) -> TensorEntry:
    """Biases of attention and norms are used as they are."""
    if len(entry.shape) != 2 or entry.name == _BIASES or entry.dtype not in DTYPES or not entry.shape[1]:
        return entry
    num_bytes = math.prod(entry.shape) * torch.float32.itemsize
    return replace(entry, dtype="F32", num_bytes=num_bytes, decode=DividedRows(entry).read, sources=(entry,))
