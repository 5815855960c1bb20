"""`penstock list` and `penstock rm`: models that were fetched from the hub, and their converted copies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from penstock.errors import CheckpointNotFound
from penstock.weights.checkpoints.hub_fetch import cache_of
from penstock_server.facade.figures import gigabytes
from penstock_server.facade.model_folders import CONVERTED


@dataclass(frozen=True)
class StoredModel:
    name: str
    #: "hub" for files as the hub has them, "converted" for a copy of `pull --convert`.
    kind: str
    folder: Path

    @property
    def num_bytes(self) -> int:
        """On the disk; a file that several links lead to counts once."""
        files = (path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink())
        return sum(path.stat().st_size for path in files)

    @property
    def is_whole(self) -> bool:
        """A fetch or a conversion has ended."""
        if self.kind == "converted":
            return self.folder.suffix != ".part"
        return any(self.folder.glob("snapshots/*/*")) and not any(self.folder.glob("blobs/*.part"))


def stored_models(cache_dir: Path) -> list[StoredModel]:
    """By name."""
    return sorted(
        [*_fetched(), *_converted(cache_dir / CONVERTED)], key=lambda model: (model.name, model.kind)
    )


def _fetched() -> Iterator[StoredModel]:
    prefix = "models--"
    for folder in cache_of("any").parent.glob(f"{prefix}*"):
        patterns = ("snapshots/*/config.json", "snapshots/*/**/*.gguf", "blobs/*.part")
        if any(path for pattern in patterns for path in folder.glob(pattern)):
            yield StoredModel(folder.name.removeprefix(prefix).replace("--", "/", 1), "hub", folder)


def _converted(root: Path) -> Iterator[StoredModel]:
    for config in [*root.glob("*/config.json"), *root.glob("*/*/config.json")]:
        name = str(config.parent.relative_to(root))
        yield StoredModel(name.removesuffix(".part"), "converted", config.parent)


def run_list(cache_dir: Path, is_json: bool) -> int:
    found = stored_models(cache_dir)
    if is_json:
        rows = [
            {
                "name": model.name,
                "kind": model.kind,
                "bytes": model.num_bytes,
                "is_whole": model.is_whole,
                "folder": str(model.folder),
            }
            for model in found
        ]
        print(json.dumps(rows))
        return 0
    if not found:
        print("no models are here yet; `penstock pull owner/name` fetches one")
        return 0
    width = max(len(model.name) for model in found)
    print(f"{'NAME':{width}}  {'SIZE':>10}  {'KIND':9}  SINCE")
    for model in found:
        since = f"{datetime.fromtimestamp(model.folder.stat().st_mtime):%Y-%m-%d}"
        rest = "" if model.is_whole else "  (not whole: the same command goes on)"
        print(f"{model.name:{width}}  {gigabytes(model.num_bytes):>10}  {model.kind:9}  {since}{rest}")
    return 0


def run_rm(cache_dir: Path, names: list[str]) -> int:
    """Raises CheckpointNotFound, before anything is deleted, for a name that is not there."""
    found = stored_models(cache_dir)
    if missing := [name for name in names if name not in {model.name for model in found}]:
        raise CheckpointNotFound(f"there is no model {missing[0]} here; `penstock list` shows those that are")
    for model in found:
        if model.name in names:
            num_bytes = model.num_bytes
            shutil.rmtree(model.folder)
            print(f"{model.name} ({model.kind}) is deleted: {gigabytes(num_bytes)}")
    return 0
