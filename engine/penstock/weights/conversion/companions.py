"""Companions: the files that a model needs beside its weights, such as tokenizer, templates and licence."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.text.tokenizer import Tokenizer
from penstock.weights.checkpoints.checkpoint import CONFIG, MANIFEST, read_bytes
from penstock.weights.conversion import whole_file

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
GENERATION = "generation_config.json"
#: A larger file than this is not a tokenizer.
MAX_COMPANION_BYTES = 256 << 20


def read_companions(
    folder: Path, guesses_tokenizer: bool = False, advice: Mapping[str, Any] | None = None
) -> dict[str, bytes]:
    """The files' contents by their names, or paths in the folder. Of a model that is one file: its tokenizer
    and its advice, as the files that a folder has (`guesses_tokenizer` is EngineConfig's guess_tokenizer,
    `advice` the sampling parameters that requests to the file get). Raises CheckpointError."""
    if folder.is_file():
        tokenizer = Tokenizer.load(folder, guesses_tokenizer)
        with tempfile.TemporaryDirectory() as temporary:
            tokenizer.backend.save_pretrained(temporary)
            saved = read_companions(Path(temporary))
        return saved | ({GENERATION: _generation_config(tokenizer, advice)} if advice else {})
    found = sorted({path for pattern in COMPANIONS for path in folder.glob(pattern) if path.is_file()})
    return {
        path.relative_to(folder).as_posix(): read_bytes(path)
        for path in found
        if path.relative_to(folder).as_posix() not in (CONFIG, MANIFEST)
        and not path.name.endswith(".index.json")
        and path.stat().st_size <= MAX_COMPANION_BYTES
    }


def _generation_config(tokenizer: Tokenizer, advice: Mapping[str, Any]) -> bytes:
    """transformers and vLLM sample only with `do_sample`, and take the tokens that end an answer from here
    where there is such a file."""
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": sorted(tokenizer.eos_token_ids) or None}
    return whole_file.json_bytes(ids | {"do_sample": advice.get("temperature") != 0, **advice})
