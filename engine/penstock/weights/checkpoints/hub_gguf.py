"""Which GGUF file of a repository is meant: `owner/name:Q4_K_M`. A model in parts is one choice."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.errors import CheckpointNotFound
from penstock.gguf_file import GGUF_PART
from penstock.weights.checkpoints.folder import GGUF_PROJECTOR, shortened

#: The mixture of types in a file's name, or in that of its folder, as llama.cpp and Unsloth write it.
_LABEL = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q\d+(?:_[A-Za-z0-9]+)*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4))"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)
#: Files beside models: what sees images, and what `llama-quantize` weighs weights by.
_NO_MODELS = (GGUF_PROJECTOR, "imatrix")


@dataclass(frozen=True)
class GgufChoice:
    """A model of a repository, in one file or in parts."""

    label: str
    files: tuple[str, ...]

    def fits(self, wanted: str) -> bool:
        """Whether this is the file's label or name."""
        names = [self.label, *(part for file in self.files for part in (file, _base(file)))]
        names += [name.removesuffix(".gguf") for name in names]
        return wanted.upper() in (name.upper() for name in names)


def split_name(name: str) -> tuple[str, str]:
    """`owner/name:Q4_K_M` -> the repository and the file that is wanted; "": none is named."""
    repository, _, wanted = name.partition(":")
    return repository, wanted


def gguf_choices(files: Iterable[str]) -> list[GgufChoice]:
    """The models among the files of a repository."""
    models = dict[str, list[str]]()
    for file in sorted(files):
        if file.endswith(".gguf") and not _base(file).startswith(_NO_MODELS):
            part = GGUF_PART.fullmatch(file)
            models.setdefault(part[1] if part else file, []).append(file)
    return [GgufChoice(_label(name), tuple(parts)) for name, parts in models.items()]


def choose(repository: str, files: Iterable[str], wanted: str) -> GgufChoice:
    """The model that `wanted` names, or the only one. Raises CheckpointNotFound, which says which there
    are."""
    files = list(files)
    models = gguf_choices(files)
    fitting = [model for model in models if model.fits(wanted)] if wanted else models
    fitting = fitting or [model for model in models if wanted.upper() in model.files[0].upper()]
    if len(fitting) == 1:
        return fitting[0]
    if not models:
        raise CheckpointNotFound(
            f"{repository} has no GGUF file of a model{_without(files)}. Name it without :"
        )
    if not wanted:
        what = f"{repository} has its weights as GGUF files"
    elif fitting:
        what = f"{wanted!r} fits {len(fitting)} GGUF files of {repository}"
    else:
        what = f"{repository} has no GGUF file {wanted!r}"
    shown = _shown(fitting or models)
    raise CheckpointNotFound(
        f"{what}{_without(files)}. Name one of them after a colon: {repository}:{shown[0]}. There are: "
        f"{', '.join(shown)}"
    )


def _shown(models: list[GgufChoice]) -> list[str]:
    """What to write after the colon for each: the label where it is the only one of its kind."""
    labels = [model.label for model in models]
    return [
        model.label if labels.count(model.label) == 1 else _base(model.files[0]).removesuffix(".gguf")
        for model in models
    ]


def _without(files: Iterable[str]) -> str:
    """What is left out."""
    projectors = [file for file in files if _base(file).startswith(GGUF_PROJECTOR)]
    return f" (beside {shortened(projectors)} for images, which is left out)" if projectors else ""


def _label(name: str) -> str:
    found = _LABEL.findall(name.removesuffix(".gguf"))
    return str(found[-1]).upper() if found else _base(name).removesuffix(".gguf")


def _base(file: str) -> str:
    return file.rpartition("/")[2]
