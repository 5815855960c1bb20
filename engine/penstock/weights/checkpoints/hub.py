"""Model name -> folder: a folder or GGUF file on this machine, a demo model, or a Hugging Face repository,
which is fetched once."""

from __future__ import annotations

import fnmatch
import glob
import re
from pathlib import Path

from penstock.errors import CheckpointNotFound, ConfigError, DownloadError, UnsafeCheckpoint
from penstock.gguf_file import is_gguf
from penstock.weights.checkpoints.folder import CONSOLIDATED, about_pickles, find_gguf, shortened
from penstock.weights.checkpoints.hub_answers import check_path, hub_library
from penstock.weights.checkpoints.hub_gguf import choose, gguf_choices, split_name

#: Models that come with Penstock.
SHIPPED = {
    name: Path(__file__).parents[2] / folder
    for name, folder in (("demo", "demo_model"), ("demo-moe", "demo_mixture"))
}
#: owner/name, as the hub spells repositories, and after a colon one of its GGUF files. Older repositories
#: ("gpt2") have no owner.
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/\w[\w.-]*)?(:[\w.-]+)?")
#: Files that a model needs. Pickles and other formats of the same weights are not fetched.
PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
#: What a plan needs: config.json, and what sentence-transformers says of a model.
CONFIG_PATTERNS = ["config.json", "modules.json", "sentence_bert_config.json", "[0-9]*_*/config.json"]
#: Pickles with a model's weights.
PICKLE_PATTERNS = ["pytorch_model.bin", "pytorch_model-*-of-*.bin"]
#: Second copies of the weights: under the names of Mistral's own code, and in folders for other programs.
COPIES = [CONSOLIDATED, "*/*.safetensors"]


def find_config(model: str | Path, revision: str | None = None, offline: bool = False) -> Path:
    """A folder that holds the model's config.json, and the files that say what the model is for. Nothing else
    of a repository is fetched: a plan needs no weights. A GGUF file, whose header says the same, has to be
    here. Raises CheckpointNotFound and DownloadError."""
    if path := _local(model):
        return path
    repository, wanted = split_name(str(model))
    if not wanted:
        return _download(repository, revision, offline, CONFIG_PATTERNS)
    try:
        return _gguf_here(repository, revision, wanted)
    except (CheckpointNotFound, DownloadError) as error:
        raise DownloadError(
            f"{model} is not here, and a plan reads a GGUF file's own header: fetch it with `penstock pull "
            f"{model}`, or plan the repository that the file was made of"
        ) from error


def find_model(
    model: str | Path, revision: str | None = None, offline: bool = False, allow_pickle: bool = False
) -> Path:
    """The folder (or GGUF file) of a model, which is given as a path, a name of SHIPPED, or a repository at a
    revision (branch, tag or commit); after a colon, one of its GGUF files (`owner/name:Q4_K_M`). For a
    folder or repository that holds one GGUF file and no safetensors, the file is returned.

    With `allow_pickle` (EngineConfig's), pickles are fetched from a repository that has its weights in no
    other form. With `offline` the network is never touched: only files that were fetched before are used.
    huggingface_hub shows the progress. Raises CheckpointNotFound, DownloadError and UnsafeCheckpoint (a
    repository has pickles alone, and they are not allowed).
    """
    if path := _local(model):
        return path
    name, wanted = split_name(str(model))
    if wanted:
        return _fetch_gguf(name, revision, offline, wanted)
    if allow_pickle and not has_safetensors(_repository_files(name, revision, offline)):
        return _download(name, revision, offline, PATTERNS + PICKLE_PATTERNS)
    folder = _download(name, revision, offline, PATTERNS)
    if not any(folder.glob("*.safetensors")):
        files = _repository_files(name, revision, offline) or _names_in(folder)
        if gguf_choices(files) and not has_safetensors(files):
            return _fetch_gguf(name, revision, offline, "")
        _check_files(name, files)
    return folder


def _fetch_gguf(repository: str, revision: str | None, offline: bool, wanted: str) -> Path:
    """The GGUF file of a repository that is wanted, or its only one; the first part of one in parts. Raises
    CheckpointNotFound and DownloadError."""
    files = _repository_files(repository, revision, offline)
    if not files:
        return _gguf_here(repository, revision, wanted)
    chosen = choose(repository, files, wanted).files
    return _download(repository, revision, offline, [glob.escape(file) for file in chosen]) / chosen[0]


def _gguf_here(repository: str, revision: str | None, wanted: str) -> Path:
    """The same of the files that were fetched before."""
    folder = _download(repository, revision, True, [])
    return folder / choose(repository, _names_in(folder), wanted).files[0]


def _names_in(folder: Path) -> list[str]:
    """The GGUF files of a repository that were fetched."""
    return [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]


def _local(model: str | Path) -> Path | None:
    """The folder or GGUF file of a model on this machine; None for a repository's name. Raises
    CheckpointNotFound for a name that is neither."""
    name = str(model)
    if name in SHIPPED:
        return SHIPPED[name]
    try:
        path = Path(model).expanduser()
        is_here = path.is_dir() or is_gguf(path)
    except (OSError, RuntimeError) as error:  # a name that is too long, a home of nobody
        raise CheckpointNotFound(f"{name:.200} can't be looked for: {error}"[:400]) from error
    if name and is_here:
        return find_gguf(path) or path
    if not isinstance(model, str) or path.exists() or not REPOSITORY.fullmatch(name):
        what = "a file that is no .gguf" if path.is_file() else "not a folder"
        raise CheckpointNotFound(
            f"{name} is {what}. Give a Hugging Face model folder, a .gguf file, a hub repository as "
            '"owner/name" (for a GGUF file "owner/name:Q4_K_M"), "demo" or "demo-moe"'
        )
    return None


def is_wanted(file: str, takes_pickles: bool = False) -> bool:
    """Whether a file of a repository belongs to what find_model() fetches."""
    patterns = PATTERNS + (PICKLE_PATTERNS if takes_pickles else [])
    return _is_any(file, patterns) and not _is_any(file, COPIES)


def _is_any(file: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatch(file, pattern) for pattern in patterns)


def has_safetensors(files: list[str]) -> bool:
    """Whether a repository has its weights as safetensors. Those in subfolders are something else."""
    return any("/" not in file and file.endswith(".safetensors") for file in files)


def _check_files(repository: str, files: list[str]) -> None:
    """Raises UnsafeCheckpoint or CheckpointNotFound, which tells in which form a repository without
    safetensors has its weights. Does nothing if no form is known."""
    if has_safetensors(files):
        return
    if pickles := [file for pattern in PICKLE_PATTERNS for file in fnmatch.filter(files, pattern)]:
        raise UnsafeCheckpoint(
            f"{repository} has its weights only as pickles ({shortened(pickles)}), which were not fetched. "
            f"{about_pickles(repository)}"
        )


def _repository_files(repository: str, revision: str | None, offline: bool) -> list[str]:
    """The names of a repository's files; [] if the hub can't be asked."""
    check_revision(revision)
    try:
        return [] if offline else hub_library().list_repo_files(repository, revision=revision)
    except fetch_errors():
        return []


def _download(repository: str, revision: str | None, offline: bool, patterns: list[str]) -> Path:
    check_revision(revision)
    huggingface_hub = hub_library()
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=COPIES,
                local_files_only=offline,
            )
        )
    except LocalEntryNotFoundError as error:
        raise DownloadError(
            f"{repository} (revision {revision or 'main'}) is not in the local cache, and there is no folder "
            f"of that name. {_why_not_fetched(offline, error.__cause__)}, and give the path of its folder"
        ) from error
    except fetch_errors() as error:
        raise DownloadError(
            f"{repository} (revision {revision or 'main'}) can't be fetched: {said(error)}. Check the name, "
            "the revision, for gated models the token (HF_TOKEN), and the proxy if there is one (HTTPS_PROXY)"
        ) from error


def _why_not_fetched(offline: bool, cause: BaseException | None) -> str:
    """Why a repository that is not in the cache was not fetched, and what to do. The variables are those that
    huggingface_hub reads."""
    from huggingface_hub import constants

    if offline:
        return "--offline forbids fetching the model: leave --offline out once, or fetch the model elsewhere"
    if constants.HF_HUB_OFFLINE:
        return (
            "HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids fetching: set it to 0 once, or fetch the model "
            "elsewhere"
        )
    reason = f" ({cause})" if cause else ""
    return (
        f"The hub can't be reached at {constants.ENDPOINT}{reason}: check the network. "
        "If a proxy leads to the hub, set HTTPS_PROXY. For a mirror, set HF_ENDPOINT to its address. With "
        "HF_HUB_OFFLINE=1, models that were fetched before load without the hub. Fetch the model elsewhere"
    )


def fetch_errors() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises where it can't fetch. Its library for HTTP has errors that are no OSError,
    as when a proxy refuses; an ImportError means that a package for the kind of proxy is missing. The errors
    of Python are those of an answer that has not what the library looks for."""
    from huggingface_hub import errors

    senseless = AssertionError, AttributeError, LookupError, RuntimeError, TypeError
    return errors.HTTPError, OSError, ValueError, ImportError, *senseless  # type: ignore[attr-defined]


def said(error: BaseException) -> str:
    """What people can make of one of fetch_errors()."""
    is_senseless = isinstance(error, AssertionError | AttributeError | LookupError | TypeError)
    return f"the hub's answer makes no sense ({error!r})" if is_senseless else str(error)


def check_revision(revision: str | None) -> None:
    """Raises ConfigError for a text that is no branch, tag or commit, and would lead out of the cache."""
    if revision is None:
        return
    try:
        check_path(revision, "--revision")
    except DownloadError as error:
        raise ConfigError(f"--revision {revision!r:.200} is no branch, tag or commit") from error
