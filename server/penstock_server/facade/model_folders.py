"""Folders of models: folders and GGUF files in them that are models, also one level deeper, as in
owner/name."""

from __future__ import annotations

from pathlib import Path

from penstock.weights.checkpoints.folder import gguf_models


def models_in(folder: Path) -> dict[str, Path]:
    """The models of a folder that is no model itself, by their names in it. {} for anything else."""
    if not folder.is_dir() or _is_model(folder):
        return {}
    found = _models_in(folder, "")
    for owner in sorted(folder.iterdir()):
        if owner.is_dir() and owner.name not in found:
            found |= _models_in(owner, f"{owner.name}/")
    return found


def _models_in(folder: Path, prefix: str) -> dict[str, Path]:
    found = {prefix + path.name: path for path in sorted(folder.iterdir()) if _is_model(path)}
    return found | {prefix + path.stem: path for path in gguf_models(folder)}


def _is_model(path: Path) -> bool:
    """Whether a folder is a model: it has a config, or exactly one GGUF file."""
    return path.is_dir() and ((path / "config.json").is_file() or len(gguf_models(path)) == 1)
