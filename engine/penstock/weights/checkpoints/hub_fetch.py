"""Fetching a repository of the hub into the hub's own cache, file by file.

huggingface_hub itself begins a file anew if its process ended amid the file, and compares no checksums. Here
a file is fetched into `blobs/CHECKSUM.part`, an interrupted one goes on where it ended, and it gets its place
in the cache when its checksum is right. The links to the files are then made by huggingface_hub.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.errors import CorruptFile, DownloadError
from penstock.weights.checkpoints.hub import fetch_errors, has_safetensors, is_wanted

#: Bytes that are hashed, and told of, at a time.
CHUNK_BYTES = 1 << 20


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
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")


def list_files(repository: str, revision: str | None, allow_pickle: bool) -> HubFiles:
    """Asks the hub. Raises DownloadError."""
    import huggingface_hub

    try:
        found = huggingface_hub.HfApi().model_info(repository, revision=revision, files_metadata=True)
    except fetch_errors() as error:
        raise DownloadError(f"the hub does not tell the files of {repository}: {error}") from error
    siblings = found.siblings or []
    takes_pickles = allow_pickle and not has_safetensors([each.rfilename for each in siblings])
    files = tuple(
        HubFile(each.rfilename, each.size or 0)
        for each in siblings
        if is_wanted(each.rfilename, takes_pickles)
    )
    return HubFiles(repository, found.sha or "", files)


def fetch_file(repository: str, commit: str, name: str, tell: Callable[[int], None]) -> None:
    """Brings a file into the cache, unless it is there. tell() gets the bytes as they come, also those that
    an earlier run fetched. Raises DownloadError, and CorruptFile for a file with another checksum than the
    hub's: the file is deleted."""
    import huggingface_hub

    url = huggingface_hub.hf_hub_url(repository, name, revision=commit)
    try:
        facts = huggingface_hub.get_hf_file_metadata(url)
        blob = cache_of(repository) / "blobs" / str(facts.etag)
        blob.parent.mkdir(parents=True, exist_ok=True)
        if blob.exists():
            tell(blob.stat().st_size)
            return
        part = blob.with_name(blob.name + ".part")
        _fetch(url, facts.location, part, tell)
    except fetch_errors() as error:
        reason = f"{name} of {repository} can't be fetched: {error}. The same command goes on later"
        raise DownloadError(reason) from error
    _check(part, blob.name, f"{name} of {repository}")
    part.replace(blob)


def _fetch(url: str, location: str, part: Path, tell: Callable[[int], None]) -> None:
    from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]

    headers: dict[str, Any] = build_hf_headers()
    if urlsplit(location).netloc != urlsplit(url).netloc:
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


def _check(path: Path, checksum: str, what: str) -> None:
    """A checksum of 64 digits is SHA-256, and one of 40 is that of a git blob."""
    if len(checksum) == 64:
        found = hashlib.sha256()
    elif len(checksum) == 40:
        found = hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    else:
        return  # a mirror with names of its own
    for piece in _pieces(path):
        found.update(piece)
    if found.hexdigest() != checksum:
        path.unlink()
        raise CorruptFile(f"{what} came with another checksum than the hub's, and was deleted: run it again")


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            yield piece
