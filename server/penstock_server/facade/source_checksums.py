"""The SHA-256 of pickled weights, computed beside a conversion. Imports no torch, so that the computation can
begin while torch is imported, which takes a second."""

from __future__ import annotations

from pathlib import Path

from penstock.weights.checkpoints.checksums import Checksums
from penstock.weights.checkpoints.folder import pickles
from penstock_server.settings.settings import Settings


def begin_checksums(settings: Settings) -> Checksums:
    """Of the pickles that will probably be converted: those of a folder on this machine. The caller closes
    them."""
    folder = Path(settings.model)
    return Checksums(pickles(folder) if settings.allow_pickle and folder.is_dir() else [])
