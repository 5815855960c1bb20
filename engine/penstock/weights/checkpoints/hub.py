"""Model name -> folder: a folder or GGUF file on this machine, the demo model, or a Hugging Face repository,
which is fetched once."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.errors import CheckpointNotFound, DownloadError
from penstock.weights.checkpoints.folder import CONSOLIDATED, find_gguf
from penstock.weights.checkpoints.gguf import is_gguf

DEMO_FOLDER = Path(__file__).parents[2] / "demo_model"
#: owner/name, as the hub spells repositories. Older repositories ("gpt2") have no owner.
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
#: Files that a model needs. Pickles and other formats of the same weights are not fetched.
PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]


def find_config(model: str | Path, revision: str | None = None, offline: bool = False) -> Path:
    """A folder that holds the model's config.json. Nothing else of a repository is fetched: a plan needs no
    weights. Raises as find_model() does."""
    return find_model(model, revision, offline, ["config.json"])


def find_model(
    model: str | Path, revision: str | None = None, offline: bool = False, patterns: list[str] = PATTERNS
) -> Path:
    """The folder (or GGUF file) of a model, which is given as a path, "demo", or a repository at a revision
    (branch, tag or commit). For a folder that holds one GGUF file and no safetensors, the file is returned.

    `patterns` are the files wanted of a repository. With `offline` the network is never touched: only files
    that were fetched before are used. huggingface_hub shows the progress. Raises CheckpointNotFound and
    DownloadError.
    """
    name = str(model)
    if name == "demo":
        return DEMO_FOLDER
    path = Path(model).expanduser()
    if name and (path.is_dir() or is_gguf(path)):
        return find_gguf(path) or path
    if not isinstance(model, str) or path.exists() or not REPOSITORY.fullmatch(name):
        what = "a file that is no .gguf" if path.is_file() else "not a folder"
        raise CheckpointNotFound(
            f"{name} is {what}. Give a Hugging Face model folder, a .gguf file, a hub repository as "
            '"owner/name", or "demo"'
        )
    return _download(name, revision, offline, patterns)


def _download(repository: str, revision: str | None, offline: bool, patterns: list[str]) -> Path:
    # The import takes a second, and folders don't need it.
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=[CONSOLIDATED],
                local_files_only=offline,
            )
        )
    except LocalEntryNotFoundError as error:
        where = (
            "is not in the local cache, and --offline forbids fetching it"
            if offline
            else ("is not in the local cache and the hub can't be reached")
        )
        raise DownloadError(
            f"{repository} (revision {revision or 'main'}) {where}. There is no folder of that name either"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise DownloadError(
            f"{repository} (revision {revision or 'main'}) can't be fetched: {error}. Check the name, the "
            "revision and, for gated models, the token (HF_TOKEN)"
        ) from error
