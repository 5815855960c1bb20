"""penstock.json: the files of a converted folder, with checksums, and the source that they were made of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError, ConfigError, CorruptFile
from penstock.weights.checkpoints.checkpoint import CONFIG, MANIFEST, Checkpoint, check_finished, read_json
from penstock.weights.checkpoints.fingerprint import fingerprints
from penstock.weights.conversion import whole_file

#: The version of the manifest; version 1 had checksums of tensors alone. Weights are safetensors in every
#: version.
FORMAT_VERSION = 2


def source_of(checkpoint: Checkpoint, way: dict[str, Any]) -> dict[str, Any]:
    """The facts that tell a source from another source, wherever it lies, and the way in which it is
    converted. The folder's name is for people alone."""
    config = json.dumps(checkpoint.config, sort_keys=True).encode()
    return {
        "folder": str(checkpoint.folder.resolve()),
        "config_sha256": hashlib.sha256(config).hexdigest(),
        "files": fingerprints(checkpoint.entries.values()),
        "way": way,
    }


def find(target: Path, source: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of a conversion of `source` to `target`; None if nothing was written there yet.

    A manifest of another version is returned only if its conversion is finished. Raises ConfigError if the
    folder has other content, or if a conversion can't be continued.
    """
    if (target / MANIFEST).is_file():
        manifest = read_json(target / MANIFEST)
        _check_source(target, manifest, source)
        return manifest | {"source": source}
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is not a folder; choose a new one")
    # A run that was killed at its very beginning leaves files, but no manifest.
    if target.exists() and not all(whole_file.is_leftover(path) for path in target.iterdir()):
        raise ConfigError(f"{target} is not empty; choose a new folder")
    return None


def begin(target: Path, source: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a new conversion."""
    manifest = {"format_version": FORMAT_VERSION, "source": source, "files": {}}
    whole_file.write_json(target / MANIFEST, manifest)
    return manifest


def whole_files(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest's entries of files that are there. A file gets its name when it is whole, so checking the
    size is enough."""
    return {
        name: entry
        for name, entry in manifest["files"].items()
        if (folder / name).is_file() and (folder / name).stat().st_size == entry["file_bytes"]
    }


def is_finished(folder: Path, manifest: dict[str, Any]) -> bool:
    """Whether the folder is a model, and has all files that were ever written."""
    return (folder / CONFIG).is_file() and len(whole_files(folder, manifest)) == len(manifest["files"])


def verify(folder: Path, report_progress: Callable[[int, int], None] | None = None) -> int:
    """Read a converted folder and compare the checksums; returns the number of files.

    Raises CorruptFile, which names the first file that is not what was written, and CheckpointError if the
    folder is not a finished conversion, or if it has the checksums of another version.
    """
    check_finished(folder)
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}, so it was not made by penstock convert")
    manifest = read_json(folder / MANIFEST)
    if manifest.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} was converted by another version of Penstock (its format is "
            f"{manifest.get('format_version')}, this one's {FORMAT_VERSION}), so its checksums can't be "
            "compared. The folder can be served as it is; to verify it, convert the model to a new folder"
        )
    files = manifest["files"]
    for index, (name, entry) in enumerate(files.items(), 1):
        _verify_file(folder / name, entry)
        if report_progress is not None:
            report_progress(index, len(files))
    return len(files)


def _verify_file(path: Path, entry: dict[str, Any]) -> None:
    remedy = "Delete it and run penstock convert again"
    try:
        found = whole_file.describe(path)
    except FileNotFoundError as error:
        raise CorruptFile(f"{path} is missing. Run penstock convert again") from error
    except OSError as error:
        raise CorruptFile(f"{path} can't be read: {error.strerror}. {remedy}") from error
    if found != {key: entry[key] for key in found}:
        raise CorruptFile(f"{path} is not what was written: its size or checksum differs. {remedy}")


def _check_source(target: Path, manifest: dict[str, Any], source: dict[str, Any]) -> None:
    """Raises ConfigError if the manifest has another source."""
    theirs, is_ours = manifest.get("source", {}), manifest.get("format_version") == FORMAT_VERSION
    if _known(theirs, is_ours) != _known(source, is_ours):
        raise ConfigError(
            f"{target} holds a conversion of {theirs.get('folder')}, which is another model, or was "
            f"quantized in another way, or has changed since; choose another folder or delete {target}"
        )
    if not is_ours and not is_finished(target, manifest):
        raise ConfigError(
            f"the conversion to {target} was begun by another version of Penstock, which writes files "
            "differently; delete the folder, or choose another folder"
        )


def _known(source: dict[str, Any], is_ours: bool) -> tuple[Any, ...]:
    """The facts of source_of() that can be compared. Other versions have the sizes of files, which come
    first."""
    config, files = source.get("config_sha256"), source.get("files", {})
    if is_ours:
        return config, files, source.get("way")
    return config, {name: of[0] for name, of in files.items()}
