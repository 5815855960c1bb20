"""transformers' own tokenizers. The import takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer


def read_auto_tokenizer(folder: Path) -> Any:
    """Raises errors of many types."""
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
