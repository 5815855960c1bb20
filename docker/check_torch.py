"""Checks, while an image is built, whether torch is made for the variant of the image.

python check_torch.py cpu | cu126 | cu130
"""

from __future__ import annotations

import sys

VARIANTS = {"cpu": None, "cu126": "12.6", "cu130": "13.0"}


def complaint(variant: str, version: str, cuda: str | None) -> str | None:
    """The error; None if torch fits. `cuda` is torch.version.cuda, which is None in builds for the CPU."""
    if variant not in VARIANTS:
        return f"VARIANT is {variant!r}; choose one of {', '.join(VARIANTS)}"
    if cuda == VARIANTS[variant]:
        return None
    found = f"for CUDA {cuda}" if cuda else "for the CPU"
    return (
        f"torch {version} is a build {found}, and not for VARIANT={variant}: name the variant's index of "
        "pytorch.org with --build-arg TORCH_INDEX=URL, or another release with --build-arg TORCH=torch==X"
    )


if __name__ == "__main__":
    import torch

    sys.exit(complaint(sys.argv[1], torch.__version__, torch.version.cuda))
