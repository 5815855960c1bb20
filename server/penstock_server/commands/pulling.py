"""`penstock pull`: fetches a model from the hub, checks it, and converts it if asked."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tqdm import tqdm

from penstock.errors import CapacityError, ConfigError
from penstock.weights.checkpoints.folder import shortened
from penstock.weights.checkpoints.hub import REPOSITORY, SHIPPED, find_model
from penstock.weights.checkpoints.hub_fetch import HubFiles, cache_of, fetch_file, list_files
from penstock_server.commands.converting import ProgressBar, summary
from penstock_server.facade.figures import gigabytes
from penstock_server.facade.loading import convert_with_checksums, open_source
from penstock_server.facade.model_folders import converted_copy
from penstock_server.settings.settings import Settings


def run_pull(settings: Settings, converts: bool, deletes_original: bool) -> int:
    """Raises PenstockError. An interrupted pull goes on with the same command."""
    name = settings.model
    if settings.offline:
        raise ConfigError("pull asks the hub: leave --offline out")
    if deletes_original and not converts:
        raise ConfigError("--delete-original would leave nothing: add --convert")
    if converts and settings.revision is not None:
        raise ConfigError("a converted copy has no revision in its name: leave --revision or --convert out")
    if name in SHIPPED or Path(name).exists() or not REPOSITORY.fullmatch(name):
        raise ConfigError(
            f"{name} is no repository of the hub, but here already: pull takes owner/name, or "
            "owner/name:Q4_K_M for a GGUF file"
        )
    found = list_files(name, settings.revision, settings.allow_pickle)
    unchecked = _fetch(found)
    find_model(name, settings.revision, allow_pickle=settings.allow_pickle)  # links the files
    print(f"{name}: {len(found.files)} files, {gigabytes(found.num_bytes)}, {_checked(found, unchecked)}")
    if converts:
        _convert(settings)
        if deletes_original:
            shutil.rmtree(cache_of(found.repository))
    return 0


def _checked(found: HubFiles, unchecked: list[str]) -> str:
    if not unchecked:
        return "with the checksums of the hub"
    if len(unchecked) == len(found.files):
        return "none of them checked, since the hub gives no checksums"
    return f"with the checksums of the hub, which gives none of {shortened(unchecked)}"


def _fetch(found: HubFiles) -> list[str]:
    """Returns the names of files of which the hub gives no checksum."""
    folder = cache_of(found.repository)
    folder.mkdir(parents=True, exist_ok=True)
    there = sum(path.stat().st_size for path in (folder / "blobs").glob("*"))
    free, missing = shutil.disk_usage(folder).free, found.num_bytes - there
    if missing > free:
        raise CapacityError(
            f"{found.repository} takes {gigabytes(found.num_bytes)}, and {folder} has room for "
            f"{gigabytes(free)}: free some, or set HF_HOME to a folder on a larger disk"
        )
    bar = tqdm(
        total=found.num_bytes,
        desc=found.repository,
        unit="B",
        unit_scale=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        early = sorted(found.files, key=lambda file: file.num_bytes)  # what is wrong is said early
        return [
            file.name for file in early if not fetch_file(found.repository, found.commit, file, bar.update)
        ]


def _convert(settings: Settings) -> None:
    """Converts into a folder beside the copy's own place, which gets its name when all is written."""
    target = converted_copy(settings.cache_dir, settings.model)
    part = target.with_name(target.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        print(f"{target} was converted before; `penstock rm {settings.model}` deletes it")
        return
    bar = ProgressBar(f"converting {settings.model}", "B")
    store = open_source(settings).store
    try:
        with store.checkpoint:
            done, checksums = convert_with_checksums(settings, store, part, bar)
    finally:
        bar.close()
    part.replace(target)
    print("\n".join([*summary(done, target), *checksums]))
