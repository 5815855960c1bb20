"""The build of torch that a variant of the image needs: where pip finds it, and whether it is the right one.

python torch_variant.py index VARIANT TORCH_INDEX    prints pip's arguments
python torch_variant.py check VARIANT                in the image's environment
"""

from __future__ import annotations

import sys

#: torch.version.cuda of each variant's build; None for the CPU.
VARIANTS = {"cpu": None, "cu126": "12.6", "cu130": "13.0"}
#: PyTorch's own indexes. pip's index has torch for CUDA 13.0.
INDEXES = {variant: f"https://download.pytorch.org/whl/{variant}" for variant in ("cpu", "cu126")}


def index_arguments(variant: str, torch_index: str) -> str:
    """The arguments with which pip finds the variant's torch. torch_index: empty for the usual index, "pip"
    for pip's own, or a URL. Raises SystemExit for an unknown variant."""
    if variant not in VARIANTS:
        raise SystemExit(f"VARIANT is {variant!r}; choose one of {', '.join(VARIANTS)}")
    url = torch_index or INDEXES.get(variant, "pip")
    return "" if url == "pip" else f"--index-url {url}"


def complaint(variant: str, version: str, cuda: str | None) -> str | None:
    """The error; None if torch fits. `cuda` is torch.version.cuda, which is None in builds for the CPU."""
    if cuda == VARIANTS[variant]:
        return None
    found = f"for CUDA {cuda}" if cuda else "for the CPU"
    return (
        f"torch {version} is a build {found}, and not for VARIANT={variant}: leave TORCH_INDEX out, or "
        "name another release with --build-arg TORCH=torch==X"
    )


if __name__ == "__main__":
    command, variant, *rest = sys.argv[1:]
    if command == "index":
        print(index_arguments(variant, *rest))
    else:
        import torch

        sys.exit(complaint(variant, torch.__version__, torch.version.cuda))
