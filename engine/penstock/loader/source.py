"""ModelSource: where a model comes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.memory.spare_memory import SpareMemory
from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelSource:
    """A model's name and where its parts are found, as Engine.load() gets them."""

    model: str | Path
    offline: bool = False
    revision: str | None = None
    #: In place of the folder's own.
    tokenizer: Tokenizer | None = None
    #: Keeps kernels that were compiled for a GPU, and the uses of experts.
    cache_folder: Path | None = None
    #: Memory of models that left.
    spare: SpareMemory | None = None
