"""Fingerprints of weight files: they tell models of the same shape apart without reading them, wherever the
files lie and whenever they were copied."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.errors import CorruptFile
from penstock.memory.ordinary_file import open_bytes
from penstock.weights.checkpoints.tensor_entry import TensorEntry

#: Bytes of each tensor that are read. A disk reads no smaller piece in less time.
SAMPLE_BYTES = 4096


def fingerprints(entries: Iterable[TensorEntry]) -> dict[str, list[Any]]:
    """File name -> size in bytes, and a checksum of the header and of a piece from the middle of each tensor.
    Raises CorruptFile."""
    files: dict[Path, list[TensorEntry]] = {}
    for source in dict.fromkeys(source for entry in entries for source in entry.sources or (entry,)):
        files.setdefault(source.file, []).append(source)
    return {file.name: _fingerprint(file, files[file]) for file in sorted(files)}


def _fingerprint(file: Path, entries: list[TensorEntry]) -> list[Any]:
    checksum = hashlib.sha256()
    try:
        with open_bytes(file, buffering=0) as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # read nothing ahead
            checksum.update(stream.read(min(entry.offset for entry in entries)))
            for entry in sorted(entries, key=lambda entry: entry.offset):
                stream.seek(entry.offset + entry.num_bytes // 2)
                checksum.update(stream.read(min(SAMPLE_BYTES, entry.num_bytes - entry.num_bytes // 2)))
            return [os.fstat(stream.fileno()).st_size, checksum.hexdigest()]
    except OSError as error:
        raise CorruptFile(f"{file} can't be read: {error.strerror}") from error
