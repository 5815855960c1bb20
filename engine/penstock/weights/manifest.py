"""penstock.json: the files that a converted folder consists of, with checksums, and what it was made of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError, ConfigError, CorruptFile
from penstock.weights import layer_file, whole_file
from penstock.weights.checkpoint import Checkpoint, read_json

MANIFEST = "penstock.json"
FORMAT_VERSION = 2


def source_of(checkpoint: Checkpoint, way: dict[str, Any]) -> dict[str, Any]:
    """What tells a source from another, wherever it lies, and the way in which it is converted; its folder is
    for people alone."""
    config = json.dumps(checkpoint.config, sort_keys=True).encode()
    return {
        "folder": str(checkpoint.folder.resolve()),
        "config_sha256": hashlib.sha256(config).hexdigest(),
        "files": checkpoint.fingerprints(),
        "way": way,
    }


def find(target: Path, source: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of a conversion of `source` to `target`; None if nothing was written there yet.

    Raises ConfigError if the folder belongs to somebody else.
    """
    if (target / MANIFEST).is_file():
        manifest = read_json(target / MANIFEST)
        _check_source(target, manifest, source)
        return manifest | {"source": source}
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is not a folder; choose a new one")
    # A run that was killed at its very beginning leaves no manifest, but other things.
    if target.exists() and not all(whole_file.is_leftover(path) for path in target.iterdir()):
        raise ConfigError(f"{target} is not empty; choose a new folder")
    return None


def begin(target: Path, source: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a new conversion."""
    manifest = {"format_version": FORMAT_VERSION, "source": source, "files": {}}
    whole_file.write_json(target / MANIFEST, manifest)
    return manifest


def whole_files(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest's entries of files that are there. Files are renamed when they are whole, so a size tells
    enough."""
    return {
        name: entry
        for name, entry in manifest["files"].items()
        if (folder / name).is_file() and (folder / name).stat().st_size == entry["file_bytes"]
    }


def check_finished(folder: Path) -> None:
    """Raises CheckpointError for a folder whose conversion was stopped."""
    if (folder / MANIFEST).is_file() and not (folder / "config.json").is_file():
        source = read_json(folder / MANIFEST).get("source", {}).get("folder", "MODEL")
        raise CheckpointError(
            f"the conversion to {folder} is not finished; run `penstock convert {source} {folder}` again: it "
            "goes on where it stopped"
        )


def verify(folder: Path, report_progress: Callable[[int, int], None] | None = None) -> int:
    """Read a converted folder and compare the checksums; returns the number of files.

    Raises CorruptFile naming the first file that is not what was written.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}, so it was not made by penstock convert")
    files = read_json(path)["files"]
    for index, (name, entry) in enumerate(files.items(), 1):
        try:
            is_good = layer_file.data_checksum(folder / name) == entry[layer_file.CHECKSUM]
        except OSError as error:
            raise CorruptFile(f"{folder / name} can't be read: {error.strerror}") from error
        if not is_good:
            raise CorruptFile(
                f"{folder / name} is not what was written: its checksum differs. Delete it and run penstock "
                "convert again"
            )
        if report_progress is not None:
            report_progress(index, len(files))
    return len(files)


def _check_source(target: Path, manifest: dict[str, Any], source: dict[str, Any]) -> None:
    """Raises ConfigError if the manifest tells of another source, or can't be gone on with."""
    version, theirs = manifest.get("format_version"), manifest.get("source", {})
    mine, other = (
        [of.get("config_sha256"), of.get("files", {}), of.get("way", source["way"])]
        for of in (source, theirs)
    )
    if version != FORMAT_VERSION:  # of whose entries nothing is known but that they begin with the size
        mine[1], other[1] = (
            {name: entry[0] for name, entry in files.items()} for files in (mine[1], other[1])
        )
    if mine != other:
        raise ConfigError(
            f"{target} holds a conversion of {theirs.get('folder')}, which is another model, or quantized "
            "in another way, or has changed since; choose another folder or delete this one"
        )
