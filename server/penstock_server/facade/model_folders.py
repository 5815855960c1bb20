"""Folders of models: folders and GGUF files in them that are models, also one level deeper, as in
owner/name."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.weights.checkpoints.folder import gguf_models

#: The folder of converted repositories in the cache folder.
CONVERTED = "models"


def converted_copy(cache_dir: Path, repository: str) -> Path:
    """Where `pull --convert` writes a repository. The folder is there when all of it is."""
    return cache_dir / CONVERTED / repository


def models_in(folder: Path) -> dict[str, Path]:
    """The models of a folder that is no model itself, by their names in it. {} for anything else."""
    if not folder.is_dir() or _is_model(folder):
        return {}
    found = _models_in(folder, "")
    for owner in sorted(folder.iterdir()):
        if _is_readable(owner) and owner.name not in found:
            found |= _models_in(owner, f"{owner.name}/")
    return found


def _models_in(folder: Path, prefix: str) -> dict[str, Path]:
    found = {prefix + path.name: path for path in sorted(folder.iterdir()) if _is_model(path)}
    return found | {prefix + path.stem: path for path in gguf_models(folder)}


def _is_model(path: Path) -> bool:
    """Whether a folder is a model: it has a config, or one GGUF file and no other model."""
    if not _is_readable(path):
        return False
    if (path / "config.json").is_file():
        return True
    return len(gguf_models(path)) == 1 and not any(_is_model(inside) for inside in path.iterdir())


def _is_readable(path: Path) -> bool:
    """Whether we may look into a folder; lost+found, for instance, is root's."""
    return path.is_dir() and os.access(path, os.R_OK | os.X_OK)
