"""From a model's name to its folder, with the hub replaced."""

from __future__ import annotations

import socket
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import errors
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from penstock.errors import CheckpointNotFound, DownloadError, UnsafeCheckpoint
from penstock.weights.checkpoints.hub import SHIPPED, find_config, find_model

#: The files of some repositories.
FILES = {
    "owner/name": ["config.json", "model.safetensors", "pytorch_model.bin"],
    "owner/sharded": ["config.json", "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"],
    "owner/gguf": [
        "README.md", "model-Q4_K_M.gguf", "model-UD-Q4_K_XL.gguf", "BF16/model-BF16-00001-of-00002.gguf",
        "BF16/model-BF16-00002-of-00002.gguf", "IQ4_XS/it-00001-of-00001.gguf", "mmproj-F16.gguf",
        "imatrix_unsloth.gguf", "plain.gguf",
    ],
    "owner/one": ["it.gguf", "mmproj-BF16.gguf", "pytorch_model.bin"],
    "owner/twice": ["a-Q8_0.gguf", "b-Q8_0.gguf", "b-Q4_0.gguf"],
    "owner/nothing": ["README.md", "model.onnx"],
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Calls that would have gone to the hub."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(repository: str, **options: Any) -> str:
        calls.append({"repository": repository, **options})
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda repository, revision: FILES[repository])
    return calls


def test_folders_and_the_demo_never_ask_the_hub(tmp_path: Path, hub: list[dict[str, Any]]) -> None:
    assert find_model(tmp_path) == tmp_path
    assert find_model(str(tmp_path)) == tmp_path
    for name, folder in SHIPPED.items():
        assert find_model(name) == folder and (folder / "config.json").is_file()
    assert hub == []


def test_a_repository_is_fetched_at_its_revision_without_pickles(
    tmp_path: Path, hub: list[dict[str, Any]]
) -> None:
    assert find_model("owner/name", revision="abc123") == tmp_path
    assert find_model("gpt2", offline=True) == tmp_path
    assert [call["repository"] for call in hub] == ["owner/name", "gpt2"]
    assert hub[0]["revision"] == "abc123" and hub[0]["local_files_only"] is False
    assert hub[1]["local_files_only"] is True
    assert not any("bin" in pattern or "*.pt" in pattern for pattern in hub[0]["allow_patterns"])


def test_a_config_is_fetched_without_the_weights(tmp_path: Path, hub: list[dict[str, Any]]) -> None:
    assert find_config("owner/name", revision="abc123") == tmp_path
    assert find_config(tmp_path) == tmp_path and len(hub) == 1
    assert (hub[0]["revision"], hub[0]["allow_patterns"][0]) == ("abc123", "config.json")
    assert not any(fnmatch("model.safetensors", pattern) for pattern in hub[0]["allow_patterns"])
    assert any(fnmatch("1_Pooling/config.json", pattern) for pattern in hub[0]["allow_patterns"])


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "a/b/c", "", "own er/name", "../up"])
def test_what_is_neither_folder_nor_repository_is_refused(name: str, hub: list[dict[str, Any]]) -> None:
    with pytest.raises(CheckpointNotFound, match="not a folder"):
        find_model(name)
    assert hub == []


def test_offline_and_not_cached_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(repository: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("not cached")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(DownloadError, match=r"owner/name.*--offline"):
        find_model("owner/name", offline=True)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub.example")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(DownloadError, match="can't be reached at https://hub.example: check") as unreachable:
        find_model("owner/name")
    for name in ("HTTPS_PROXY", "HF_ENDPOINT", "HF_HUB_OFFLINE", "the path of its folder"):
        assert name in str(unreachable.value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE .* forbids fetching: set it to 0"):
        find_model("owner/name")


def test_a_proxy_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors of the library by which huggingface_hub speaks HTTP are no OSErrors."""
    refusal = errors.HTTPError("407 Proxy Authentication Required")  # type: ignore[attr-defined]
    assert not isinstance(refusal, OSError)

    def refuse(repository: str, **options: Any) -> str:
        raise refusal

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(DownloadError, match="407.*HTTPS_PROXY"):
        find_config("owner/name")


def test_offline_really_touches_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real huggingface_hub, with every way to open a connection forbidden."""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", forbidden)
    monkeypatch.setattr(socket, "getaddrinfo", forbidden)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DownloadError, match="--offline"):
        find_model("owner/never-downloaded", offline=True)


def test_a_repository_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    class NotThere(RepositoryNotFoundError):
        def __init__(self) -> None:
            Exception.__init__(self, "404")

    def refuse(repository: str, **options: Any) -> str:
        raise NotThere

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(DownloadError, match="HF_TOKEN"):
        find_model("owner/name")


# ---- pickles


def test_pickles_are_not_fetched_and_named_with_what_to_do(hub: list[dict[str, Any]]) -> None:
    with pytest.raises(
        UnsafeCheckpoint, match=r"owner/sharded.*00001-of-00002.bin, .*not fetched.*--allow-pickle"
    ):
        find_model("owner/sharded")
    assert find_model("owner/nothing").is_dir()  # opening the folder tells what is missing
    assert not any("bin" in pattern for call in hub for pattern in call["allow_patterns"])


def test_pickles_are_fetched_when_asked_for_and_when_there_is_nothing_else(
    hub: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_model("owner/name", allow_pickle=True)
    assert not any("bin" in pattern for pattern in hub[-1]["allow_patterns"])
    find_model("owner/sharded", allow_pickle=True)
    patterns = hub[-1]["allow_patterns"]
    for name in FILES["owner/sharded"]:
        assert any(fnmatch(name, pattern) for pattern in patterns)
    for name in ("training_args.bin", "optimizer.pt", "tf_model.h5", "pytorch_model.fp16.bin"):
        assert not any(fnmatch(name, pattern) for pattern in patterns)
    find_model("owner/sharded", offline=True, allow_pickle=True)  # whatever was fetched before
    assert hub[-1]["local_files_only"] and hub[-1]["allow_patterns"] == patterns


def test_a_hub_that_does_not_list_files_is_no_error(
    hub: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(repository: str, revision: str | None) -> list[str]:
        raise ConnectionError("down")

    monkeypatch.setattr("huggingface_hub.list_repo_files", fail)
    assert find_model("owner/sharded").is_dir()
    assert find_model("owner/sharded", allow_pickle=True).is_dir()


# ---- GGUF files


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("owner/gguf:Q4_K_M", ["model-Q4_K_M.gguf"]),
        ("owner/gguf:q4_k_m", ["model-Q4_K_M.gguf"]),
        ("owner/gguf:UD-Q4_K_XL", ["model-UD-Q4_K_XL.gguf"]),
        ("owner/gguf:Q4_K_XL", ["model-UD-Q4_K_XL.gguf"]),
        ("owner/gguf:BF16", FILES["owner/gguf"][3:5]),
        ("owner/gguf:IQ4_XS", ["IQ4_XS/it-00001-of-00001.gguf"]),
        ("owner/gguf:plain", ["plain.gguf"]),
        ("owner/gguf:plain.gguf", ["plain.gguf"]),
        ("owner/twice:Q4_0", ["b-Q4_0.gguf"]),
        ("owner/twice:a-Q8_0", ["a-Q8_0.gguf"]),
        ("owner/one", ["it.gguf"]),
    ],
)
def test_a_gguf_file_of_a_repository(
    name: str, files: list[str], hub: list[dict[str, Any]], tmp_path: Path
) -> None:
    """All parts of it are fetched, and nothing else."""
    assert find_model(name, revision="abc") == tmp_path / files[0]
    assert hub[-1]["allow_patterns"] == files and hub[-1]["repository"] == name.partition(":")[0]
    assert hub[-1]["revision"] == "abc"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "owner/gguf",
            r"as GGUF files \(beside mmproj-F16.gguf for images, which is left out\). Name one of them "
            "after a colon: owner/gguf:BF16. There are: BF16, IQ4_XS, Q4_K_M, UD-Q4_K_XL, plain$",
        ),
        ("owner/gguf:Q5_K_M", "no GGUF file 'Q5_K_M'.* There are: BF16, IQ4_XS, Q4_K_M, "),
        ("owner/gguf:Q4", "'Q4' fits 3 GGUF files .* There are: IQ4_XS, Q4_K_M, UD-Q4_K_XL$"),
        ("owner/twice:Q8_0", "'Q8_0' fits 2 GGUF files .* There are: a-Q8_0, b-Q8_0$"),
        ("owner/name:Q8_0", "owner/name has no GGUF file of a model"),
    ],
)
def test_gguf_files_that_are_not_told_apart(name: str, message: str, hub: list[dict[str, Any]]) -> None:
    with pytest.raises(CheckpointNotFound, match=message):
        find_model(name)
    assert all(
        "model" not in str(call["allow_patterns"]) or "*.model" in call["allow_patterns"] for call in hub
    )


def test_gguf_files_that_were_fetched_before(hub: list[dict[str, Any]], tmp_path: Path) -> None:
    for name in ("it-Q4_K_M.gguf", "it-Q8_0.gguf", "mmproj-F16.gguf"):
        (tmp_path / name).touch()
    assert find_model("owner/gguf:Q8_0", offline=True) == tmp_path / "it-Q8_0.gguf"
    assert find_config("owner/gguf:Q4_K_M") == tmp_path / "it-Q4_K_M.gguf"
    assert all(call["local_files_only"] for call in hub)
    with pytest.raises(DownloadError, match="not here, and a plan reads .*`penstock pull owner/gguf:Q2_K`"):
        find_config("owner/gguf:Q2_K")
