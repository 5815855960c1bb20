"""Fetching a repository of the hub into the hub's own cache, file by file.

huggingface_hub itself begins a file anew if its process ended amid the file, and compares no checksums. Here
a file is fetched into `blobs/CHECKSUM.part`, an interrupted one goes on where it ended, and it gets its place
in the cache when its checksum is right. The links to the files are then made by huggingface_hub.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.errors import CorruptFile, DownloadError
from penstock.weights.checkpoints.folder import MAX_NAME_BYTES
from penstock.weights.checkpoints.hub import (
    check_revision,
    fetch_errors,
    has_safetensors,
    is_wanted,
    said,
)
from penstock.weights.checkpoints.hub_answers import hub_library
from penstock.weights.checkpoints.hub_gguf import choose, gguf_choices, split_name

#: Bytes that are hashed, and told of, at a time.
CHUNK_BYTES = 1 << 20
_CHECKSUM = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
#: Ending of the name of a file that is being fetched.
_PART = ".part"


@dataclass(frozen=True)
class HubFile:
    name: str
    num_bytes: int


@dataclass(frozen=True)
class HubFiles:
    """The files of a repository that a model needs."""

    repository: str
    #: The revision's commit.
    commit: str
    files: tuple[HubFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def cache_of(repository: str) -> Path:
    """A repository's folder in the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"


def list_files(model: str, revision: str | None, allow_pickle: bool) -> HubFiles:
    """Asks the hub for the files of owner/name, or of the GGUF file that is named after a colon. Raises
    DownloadError, and CheckpointNotFound where several GGUF files may be meant."""
    check_revision(revision)
    repository, wanted = split_name(model)
    try:
        found = hub_library().HfApi().model_info(repository, revision=revision, files_metadata=True)
    except fetch_errors() as error:
        raise DownloadError(f"the hub does not tell the files of {repository}: {said(error)}") from error
    if not found.sha:
        raise DownloadError(f"the hub does not tell the commit of {repository}: is it a hub?")
    siblings = found.siblings or []
    names = [each.rfilename for each in siblings]
    takes_pickles = allow_pickle and not has_safetensors(names)
    needed = [name for name in names if is_wanted(name, takes_pickles)]
    if wanted or (gguf_choices(names) and not has_safetensors(names) and not takes_pickles):
        needed = list(choose(repository, names, wanted).files)
    files = tuple(HubFile(each.rfilename, each.size or 0) for each in siblings if each.rfilename in needed)
    return HubFiles(repository, found.sha, files)


def fetch_file(repository: str, commit: str, file: HubFile, tell: Callable[[int], None]) -> bool:
    """Brings a file into the cache, unless it is there. tell() gets the bytes as they come, also those that
    an earlier run fetched. Returns whether the hub gave a checksum to compare. Raises DownloadError, and
    CorruptFile for a file with another checksum or size than the hub's: the file is deleted."""
    huggingface_hub, what = hub_library(), f"{file.name} of {repository}"
    url = huggingface_hub.hf_hub_url(repository, file.name, revision=commit)
    try:
        facts = huggingface_hub.get_hf_file_metadata(url)
        if not facts.etag:
            raise DownloadError(f"{what} can't be fetched: {url} gives no checksum (ETag): is it a hub?")
        checksum = str(facts.etag)
        blob = cache_of(repository) / "blobs" / checksum
        blob.parent.mkdir(parents=True, exist_ok=True)
        if blob.exists():
            tell(blob.stat().st_size)
            return _CHECKSUM.fullmatch(checksum) is not None
        part = blob.with_name(f"{checksum[: MAX_NAME_BYTES - len(_PART)]}{_PART}")
        _fetch(url, facts.location, part, file.num_bytes, tell)
    except fetch_errors() as error:
        reason = f"{what} can't be fetched: {said(error)}. The same command goes on later"
        raise DownloadError(reason) from error
    _check(part, checksum, file.num_bytes, what)
    part.replace(blob)
    return _CHECKSUM.fullmatch(checksum) is not None


def _fetch(url: str, location: str, part: Path, num_bytes: int, tell: Callable[[int], None]) -> None:
    """Adds to `part`, which never grows beyond `num_bytes` by more than a chunk, if that is known (not 0)."""
    from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]

    headers: dict[str, Any] = build_hf_headers()
    if urlsplit(location)[:2] != urlsplit(url)[:2]:
        headers.pop("authorization", None)  # the file lies with somebody else
    begun = part.stat().st_size if part.exists() else 0
    headers |= {"Accept-Encoding": "identity"} | ({"Range": f"bytes={begun}-"} if begun else {})
    with get_session().stream("GET", location, headers=headers, follow_redirects=True) as answer:
        if answer.status_code == 416:  # nothing is left to fetch
            tell(begun)
            return
        answer.raise_for_status()
        goes_on = answer.status_code == 206
        tell(begun if goes_on else 0)
        with part.open("ab" if goes_on else "wb") as file:
            for chunk in answer.iter_bytes(CHUNK_BYTES):
                file.write(chunk)
                tell(len(chunk))
                if 0 < num_bytes < file.tell():
                    return  # _check() finds that it is too long


def _check(path: Path, checksum: str, num_bytes: int, what: str) -> None:
    """A checksum of 64 digits is SHA-256, and one of 40 is that of a git blob."""
    found_bytes = path.stat().st_size
    if num_bytes and found_bytes != num_bytes:
        path.unlink()
        raise CorruptFile(
            f"{what} came with {'more' if found_bytes > num_bytes else 'fewer'} than the {num_bytes} bytes "
            "that the hub tells, and was deleted: run it again"
        )
    if not _CHECKSUM.fullmatch(checksum):
        return  # a mirror with names of its own: fetch_file() tells
    found = hashlib.sha256() if len(checksum) == 64 else hashlib.sha1(b"blob %d\0" % found_bytes)
    for piece in _pieces(path):
        found.update(piece)
    if found.hexdigest() != checksum:
        path.unlink()
        raise CorruptFile(f"{what} came with another checksum than the hub's, and was deleted: run it again")


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            yield piece
