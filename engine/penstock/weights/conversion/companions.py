"""Companions: the files that a model needs beside its weights, such as tokenizer, templates and licence."""

from __future__ import annotations

import tempfile
from pathlib import Path

from penstock.text.tokenizer import Tokenizer
from penstock.weights.checkpoints.checkpoint import read_bytes
from penstock.weights.conversion.manifest import CONFIG, MANIFEST

COMPANIONS = (
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "*.tiktoken",
    "*.spm",
    "LICENSE*",
    "NOTICE*",
    "README.md",
    "[0-9]*_*/config.json",  # the parts that sentence-transformers' modules.json names
)
#: A larger file than this is not a tokenizer.
MAX_COMPANION_BYTES = 256 << 20


def read_companions(folder: Path, guesses_tokenizer: bool = False) -> dict[str, bytes]:
    """The files' contents by their names, or paths in the folder. Of a model that is one file: its tokenizer,
    as the files that a folder has (`guesses_tokenizer` is EngineConfig's guess_tokenizer). Raises
    CheckpointError."""
    if folder.is_file():
        with tempfile.TemporaryDirectory() as temporary:
            Tokenizer.load(folder, guesses_tokenizer).backend.save_pretrained(temporary)
            return read_companions(Path(temporary))
    found = sorted({path for pattern in COMPANIONS for path in folder.glob(pattern) if path.is_file()})
    return {
        path.relative_to(folder).as_posix(): read_bytes(path)
        for path in found
        if path.relative_to(folder).as_posix() not in (CONFIG, MANIFEST)
        and not path.name.endswith(".index.json")
        and path.stat().st_size <= MAX_COMPANION_BYTES
    }
