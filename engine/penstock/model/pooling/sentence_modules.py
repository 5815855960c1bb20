"""SentenceModules: what sentence-transformers' files say of a folder: modules.json lists the parts of a
model, and each part has a folder with a config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import MALFORMED, InvalidConfig, UnsupportedModel
from penstock.model.pooling.pooling_spec import SENTENCE_MODES, PoolingKind
from penstock.weights.checkpoints.checkpoint import read_bytes, read_json
from penstock.weights.checkpoints.folder import is_file_name

MODULES = "modules.json"
#: The parts that are computed here.
_KNOWN = ("Transformer", "Pooling", "Normalize", "LogitScore")


@dataclass(frozen=True)
class SentenceModules:
    """The parts of a folder that are computed here."""

    #: None where no part pools.
    kind: PoolingKind | None = None
    normalizes: bool = False
    #: The tokens that say "no" and "yes", of a model whose score is the difference of their logits.
    score_tokens: tuple[int, int] | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_length: int | None = None
    #: Texts are written in lower case before they are tokenized.
    lowers_case: bool = False


def read_modules(folder: Path) -> SentenceModules | None:
    """None for a folder that sentence-transformers did not write. Raises InvalidConfig for files that make no
    sense, and UnsupportedModel for parts that are not computed here."""
    if folder.is_file() or not (folder / MODULES).is_file():
        return None
    try:
        return _read(folder)
    except MALFORMED as error:
        raise InvalidConfig(
            f"{folder / MODULES} and the files that it names make no sense ({error!r}); download them again"
        ) from error


def _read(folder: Path) -> SentenceModules:
    parts = {str(part["type"]).rpartition(".")[2]: str(part["path"]) for part in _modules(folder)}
    if unknown := [name for name in parts if name not in _KNOWN]:
        raise UnsupportedModel(
            f"{folder / MODULES} has the part {', '.join(unknown)}; Penstock computes {', '.join(_KNOWN)}. "
            "A model without such a part embeds here, such as BAAI/bge-m3 or Qwen/Qwen3-Embedding-0.6B"
        )
    told = _json(folder / "config_sentence_transformers.json")
    prompts = told.get("prompts") or {}
    prompts = {str(name): str(text) for name, text in prompts.items()} if isinstance(prompts, dict) else {}
    default = told.get("default_prompt_name")
    tokens = _json(folder / parts["LogitScore"] / "config.json") if "LogitScore" in parts else None
    own = _json(folder / "sentence_bert_config.json")
    length = own.get("max_seq_length")
    return SentenceModules(
        _kind(folder / parts["Pooling"] / "config.json", prompts) if "Pooling" in parts else None,
        "Normalize" in parts,
        None if tokens is None else (int(tokens["false_token_id"]), int(tokens["true_token_id"])),
        prompts,
        default if default in prompts else None,
        length if isinstance(length, int) and length > 0 else None,
        own.get("do_lower_case") is True,
    )


def _modules(folder: Path) -> list[dict[str, Any]]:
    found: Any = json.loads(read_bytes(folder / MODULES))
    if not isinstance(found, list) or not all(isinstance(part, dict) for part in found):
        raise InvalidConfig(f"{folder / MODULES} is no list of parts; download it again")
    for part in found:
        if part.get("path") and not is_file_name(part["path"].removesuffix("/")):
            raise InvalidConfig(f"{folder / MODULES} has a part in {part['path']!r:.200}, which lies outside")
    return found


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _kind(path: Path, prompts: Mapping[str, str]) -> PoolingKind:
    """The kind in a part's config.json. Raises UnsupportedModel for several at once."""
    config = read_json(path)
    kinds = [kind for name, kind in SENTENCE_MODES.items() if config.get(name)]
    # Newer files name the kind itself: "mean", "lasttoken".
    named = f"pooling_mode_{config.get('pooling_mode')}"
    kinds += [
        SENTENCE_MODES[name]
        for name in (named, f"{named}_token", f"{named}_tokens")
        if name in SENTENCE_MODES
    ]
    if len(kinds) != 1:
        raise UnsupportedModel(
            f"{path} has {' and '.join(kinds) or 'no kind of pooling'}; Penstock computes one of "
            f"{', '.join(SENTENCE_MODES.values())}"
        )
    if config.get("include_prompt") is False and any(prompts.values()):
        raise UnsupportedModel(
            f"{path} leaves the prompt's tokens out of the pooled vector (include_prompt: false), which "
            "Penstock does not do"
        )
    return kinds[0]
