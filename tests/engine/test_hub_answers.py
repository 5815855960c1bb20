"""Hubs that answer with names which lead elsewhere, and servers that are no hubs, on every way on which a
model is fetched. huggingface_hub is the real one, and the hub is a server on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from end_to_end.local_hub import COMMIT, LocalHub
from penstock.errors import ConfigError, CorruptFile, DownloadError, PenstockError
from penstock.weights.checkpoints.hub import find_config, find_model
from penstock.weights.checkpoints.hub_answers import check_answer, check_name, check_path
from penstock.weights.checkpoints.hub_fetch import HubFile, fetch_file, list_files
from penstock_server.cli import main

NAME = "org/model"
WAYS: dict[str, Callable[[], object]] = {
    "pull": lambda: pulled(),
    "find_model": lambda: find_model(NAME),
    "find_model with pickles": lambda: find_model(NAME, allow_pickle=True),
    "find_config": lambda: find_config(NAME),
}


def pulled() -> None:
    found = list_files(NAME, None, False)
    for file in found.files:
        fetch_file(NAME, found.commit, file, lambda count: None)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    folder = tmp_path / "hub" / NAME
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(3000))
    close_session()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with LocalHub(tmp_path / "hub") as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", hub.url)
        yield hub


def written_outside(folder: Path) -> list[Path]:
    """Files that are neither the hub's own nor in its cache."""
    cache = folder / "cache" / "hub"
    places = folder / "hub", cache / "models--org--model", cache / ".locks"
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if not any(place in path.parents for place in places)]


@pytest.mark.parametrize("way", WAYS)
def test_a_hub_as_it_should_be(hub: LocalHub, tmp_path: Path, way: str) -> None:
    WAYS[way]()
    assert any((tmp_path / "cache" / "hub" / "models--org--model" / "blobs").iterdir())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["../../../../escaped", "/tmp/escaped", "..", ".", "a/b", "a\0b", "x" * 300])
def test_a_checksum_that_is_a_path(hub: LocalHub, tmp_path: Path, way: str, name: str) -> None:
    if "\0" in name:
        pytest.raises(DownloadError, check_name, name, "a checksum", hub.url)
        return
    hub.headers = {"ETag": f'"{name}"'}
    hub.tree = [
        {"type": "file", "path": "config.json", "size": 2, "oid": "0", "lfs": {"oid": name, "size": 2}}
    ]
    with pytest.raises(DownloadError, match="checksum"):
        WAYS[way]()
    assert written_outside(tmp_path) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("commit", ["../../../../escaped", "/tmp/escaped", "..", "a/b", 7, ["a"]])
def test_a_commit_that_is_a_path(hub: LocalHub, tmp_path: Path, way: str, commit: Any) -> None:
    hub.model = {"sha": commit}
    hub.headers = {"X-Repo-Commit": str(commit).replace("[", "/")}
    with pytest.raises(DownloadError, match="commit"):
        WAYS[way]()
    assert written_outside(tmp_path) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "file",
    [
        {"name": "../../../../escaped.json"},
        {"name": "/tmp/escaped.json"},
        {"name": "a//b.json"},
        {"name": "a/./b.json"},
        {"name": ""},
        {"name": None},
        {"name": "x" * 300 + ".json"},
        {"name": "ok.json", "size": -1},
        {"name": "ok.json", "size": "many"},
        {"name": "ok.json", "size": 1.5},
    ],
)
def test_a_file_that_is_none(hub: LocalHub, tmp_path: Path, way: str, file: dict[str, Any]) -> None:
    name, size = file["name"], file.get("size", 2)
    hub.model = {"siblings": [{"rfilename": name, "size": size}]}
    hub.tree = [{"type": "file", "path": name, "size": size, "oid": "0"}]
    with pytest.raises(DownloadError, match="names a file|a size that is none"):
        WAYS[way]()
    assert written_outside(tmp_path) == []


PORTALS = {
    "an empty object": (200, {"Content-Type": "application/json"}, b"{}"),
    "a page": (200, {"Content-Type": "text/html"}, b"<html>Welcome! Please log in.</html>"),
    "a list": (200, {"Content-Type": "application/json"}, b"[]"),
    "a number": (200, {"Content-Type": "application/json"}, b"7"),
    "nothing": (200, {}, b""),
    "depth": (200, {}, b"[" * 100_000),
    "no list of files": (200, {}, b'{"id": "a", "sha": "a", "siblings": {"a": 1}}'),
    "files that are none": (200, {}, b'{"id": "a", "sha": "a", "siblings": [7]}'),
    "no commit": (200, {}, b'{"id": "org/model", "siblings": []}'),
    "a file of this machine": (302, {"Location": "file:///etc/passwd"}, b""),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("portal", PORTALS)
def test_a_server_that_is_no_hub(hub: LocalHub, tmp_path: Path, way: str, portal: str) -> None:
    """A named error, and no traceback."""
    hub.portal = PORTALS[portal]
    with pytest.raises(DownloadError):
        WAYS[way]()
    assert written_outside(tmp_path) == []


def test_a_portal_is_said_on_the_command_line(hub: LocalHub, capsys: pytest.CaptureFixture[str]) -> None:
    for body in (b"{}", b"<html>"):
        hub.portal = (200, {}, body)
        assert main(["pull", NAME]) == 1
        assert "is no answer of a hub: is a portal" in capsys.readouterr().err


def test_redirects_stay_as_safe_as_they_were() -> None:
    def answer(url: str, target: str) -> httpx2.Response:
        return httpx2.Response(302, headers={"Location": target}, request=httpx2.Request("GET", url))

    check_answer(answer("https://hub/x", "/y"))
    check_answer(answer("https://hub/x", "https://cdn/y"))
    check_answer(answer("http://mirror/x", "http://cdn/y"))
    for target in ("http://portal/", "file:///etc/passwd", "ftp://a/b", "javascript:x"):
        with pytest.raises(DownloadError, match="as safe as the hub"):
            check_answer(answer("https://hub/x", target))


def test_what_has_no_checksum_is_said(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.headers = {"ETag": '"64b5f3-1a2b"'}  # as nginx gives it
    assert main(["pull", NAME]) == 0
    assert "none of them checked, since the hub gives no checksums" in capsys.readouterr().out
    hub.headers = {"ETag": None}
    with pytest.raises(DownloadError, match="gives no checksum"):
        pulled()


def test_pulling_one_gguf_file(hub: LocalHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both parts of it and no other file; then it is found without the hub."""
    parts = [f"it-IQ4_XS-0000{number}-of-00002.gguf" for number in (1, 2)]
    for name in (*parts, "it-Q8_0.gguf", "mmproj-F16.gguf"):
        (tmp_path / "hub" / NAME / name).write_bytes(name.encode())
    assert main(["pull", f"{NAME}:Q2_K"]) == 1
    assert "no GGUF file 'Q2_K' (beside mmproj-F16.gguf" in capsys.readouterr().err
    assert main(["pull", f"{NAME}:IQ4_XS"]) == 0
    assert f"{NAME}:IQ4_XS: 2 files" in capsys.readouterr().out
    assert {name for name, _ in hub.sent} == set(parts)
    found = find_model(f"{NAME}:iq4_xs", offline=True)
    assert found.name == parts[0] and found.read_bytes() == parts[0].encode()
    assert main(["list"]) == 0 and NAME in capsys.readouterr().out


@pytest.mark.parametrize("told", [2999, 3001])
def test_a_file_of_another_size(hub: LocalHub, tmp_path: Path, told: int) -> None:
    """Also where there is no checksum that could tell; and what never ends is cut."""
    hub.headers = {"ETag": '"no-checksum"'}
    with pytest.raises(CorruptFile, match=f"(more|fewer) than the {told} bytes"):
        fetch_file(NAME, COMMIT, HubFile("model.safetensors", told), lambda count: None)
    assert not list((tmp_path / "cache").rglob("no-checksum*"))


@pytest.mark.parametrize("revision", ["../../../escaped", "/etc", "a/../b", "", "a\nb"])
def test_a_revision_that_is_a_path(hub: LocalHub, revision: str) -> None:
    for find in (find_model, find_config):
        with pytest.raises(ConfigError, match="no branch, tag or commit"):
            find(NAME, revision)
    with pytest.raises(ConfigError, match="no branch, tag or commit"):
        list_files(NAME, revision, False)
    assert find_config(NAME, "refs/pr/1").is_dir()


@pytest.mark.parametrize("name", ["owner/..", "owner/.", "owner/-x/..", "../x", "a/../../b"])
def test_a_repository_that_is_a_path(hub: LocalHub, name: str) -> None:
    with pytest.raises(PenstockError):
        find_model(name)


def test_names_of_real_repositories_pass() -> None:
    for name in (
        "config.json",
        "1_Pooling/config.json",
        "onnx/model (1).onnx",
        "a..b.json",
        ".gitattributes",
    ):
        check_path(name, "url")
    for checksum in (COMMIT, "a" * 64, "64b5f3-1a2b", "0x8DB5E3", f"{'d' * 32}-38", "sha256:ab"):
        check_name(checksum, "a checksum", "url")
    sibling = {"rfilename": "\u6a21\u578b.txt", "size": None, "lfs": None}
    model = {"id": NAME, "sha": COMMIT, "siblings": [sibling], "cardData": {"path": 7}}
    request = httpx2.Request("GET", "https://hub/api/models/org/model/revision/refs%2Fpr%2F1")
    check_answer(httpx2.Response(200, content=json.dumps(model).encode(), request=request))
