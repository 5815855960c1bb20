"""What a hub answers, looked at before anything uses it. Names of files, commits and checksums come from a
network, whose owner may be a mirror, a proxy or the portal of a hotel, and become paths on this machine."""

from __future__ import annotations

import json
import re
from functools import cache
from types import ModuleType
from typing import Any
from urllib.parse import urljoin, urlsplit

from penstock.errors import DownloadError
from penstock.weights.checkpoints.folder import is_file_name, is_path_part

_ABOUT_MODEL = re.compile(r".*/api/models/[^/]+(/(?!tree/)[^/]+)?(/revision/[^/]+)?/?")
_ABOUT_TREE = re.compile(r".*/api/models/.+/tree/.+")
_PORTAL = (
    "is no answer of a hub: is a portal, a proxy or another server in its place? Open the address in a "
    "browser, check HF_ENDPOINT and HTTPS_PROXY, or pass --offline to use files that were fetched before"
)


@cache
def hub_library() -> ModuleType:
    """huggingface_hub, whose every answer passes through check_answer(). The import takes a second."""
    import huggingface_hub
    from huggingface_hub.utils import _http

    make = _http._GLOBAL_CLIENT_FACTORY  # somebody may have set one of their own

    def guarded() -> Any:
        client = make()
        client.event_hooks = client.event_hooks | {
            "response": [*client.event_hooks.get("response", ()), check_answer]
        }
        return client

    huggingface_hub.set_client_factory(guarded)
    return huggingface_hub


def check_answer(answer: Any) -> None:
    """Raises DownloadError for an answer (an httpx2.Response) with a name that is none."""
    url, headers = str(answer.request.url), answer.headers
    if target := headers.get("Location"):
        _check_redirect(url, target)
    if commit := headers.get("X-Repo-Commit"):
        check_name(commit, "a commit", url)
    if answer.request.method == "HEAD":  # the answers to others have bytes, and nobody takes names from them
        for name in ("X-Linked-Etag", "ETag"):
            if name in headers:
                check_name(headers[name].removeprefix("W/").strip('"'), "a checksum (ETag)", url)
    path = urlsplit(url).path
    if answer.status_code == 200 and answer.request.method == "GET":
        if _ABOUT_TREE.fullmatch(path):
            _check_tree(_read(answer, list), url)
        elif _ABOUT_MODEL.fullmatch(path):
            _check_model(_read(answer, dict), url)


def _check_redirect(url: str, target: str) -> None:
    scheme = urlsplit(urljoin(url, target)).scheme
    if scheme not in ("http", "https") or (scheme == "http" and url.startswith("https:")):
        raise DownloadError(
            f"{url} leads to {target:.200}, which is not as safe as the hub itself: is a portal or a proxy "
            "in its place?"
        )


def _read(answer: Any, kind: type) -> Any:
    """The JSON of an answer. Raises DownloadError."""
    try:
        content = json.loads(answer.read())
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, kind):
        raise DownloadError(f"{answer.request.url} {_PORTAL}")
    return content


def _check_model(model: dict[str, Any], url: str) -> None:
    siblings = model.get("siblings") or []
    if not isinstance(model.get("id") or model.get("modelId"), str) or not isinstance(siblings, list):
        raise DownloadError(f"{url} {_PORTAL}")
    if model.get("sha") is not None:
        check_name(model["sha"], "a commit", url)
    for each in siblings:
        _check_file(each, "rfilename", url)


def _check_tree(tree: list[Any], url: str) -> None:
    for each in tree:
        _check_file(each, "path", url)


def _check_file(told: Any, key: str, url: str) -> None:
    """A file as the hub tells of it: its name, its size, its checksums."""
    if not isinstance(told, dict):
        raise DownloadError(f"{url} {_PORTAL}")
    check_path(told.get(key), url)
    lfs = told.get("lfs") or {}
    if not isinstance(lfs, dict):
        raise DownloadError(f"{url} {_PORTAL}")
    for size in (told.get("size"), lfs.get("size")):
        if size is not None and (type(size) is not int or size < 0):
            raise DownloadError(f"{url} gives {told[key]} a size that is none: {size!r:.80}")
    for checksum in (lfs.get("oid"), lfs.get("sha256"), told.get("xetHash")):
        if checksum is not None:
            check_name(checksum, "a checksum", url)


def check_path(name: Any, url: str) -> None:
    """Raises DownloadError unless a file's name leads to a file inside the repository's folder."""
    if not is_file_name(name):
        raise DownloadError(f"{url} names a file {name!r:.200}, which is no name of a file in a repository")


def check_name(name: Any, what: str, url: str) -> None:
    """Raises DownloadError unless `name` can be the name of one file or folder."""
    if not isinstance(name, str) or "/" in name or name.startswith(".") or not is_path_part(name):
        raise DownloadError(f"{url} gives {what} that is none: {name!r:.200}")
