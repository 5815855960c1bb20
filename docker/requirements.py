"""Prints, while an image is built, the requirements in pyproject.toml, to install them before the project.

python requirements.py EXTRA,EXTRA VARIANT
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any


def requirements(project: dict[str, Any], extras: str, variant: str) -> list[str]:
    """The requirements of the project with `extras`. project: the table of that name in pyproject.toml.

    The variant for CUDA 12.6 also gets the extra nvrtc, which knows a GTX 10xx; torch for CUDA 13 brings an
    NVRTC that fits. Raises SystemExit for an unknown extra.
    """
    chosen = [extra for extra in extras.split(",") if extra] + ["nvrtc"] * (variant == "cu126")
    optional = project["optional-dependencies"]
    if missing := set(chosen) - optional.keys():
        raise SystemExit(f"EXTRAS: there is no {', '.join(sorted(missing))}; choose of {', '.join(optional)}")
    return [*project["dependencies"], *(each for extra in chosen for each in optional[extra])]


if __name__ == "__main__":
    table = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    print("\n".join(requirements(table, *sys.argv[1:])))
