"""Run while an image is built: prints what pyproject.toml wants, so that it can be installed before the
project itself.

    python requirements.py EXTRA,EXTRA VARIANT
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any


def requirements(project: dict[str, Any], extras: str, variant: str) -> list[str]:
    """`project` is pyproject.toml's table. CUDA 12.6 gets our NVRTC, which knows a GTX 10xx; torch brings one
    that fits for CUDA 13. Raises SystemExit for an extra that is not there."""
    chosen = [extra for extra in extras.split(",") if extra] + ["nvrtc"] * (variant == "cu126")
    optional = project["optional-dependencies"]
    if missing := set(chosen) - optional.keys():
        raise SystemExit(f"EXTRAS: there is no {', '.join(sorted(missing))}; choose of {', '.join(optional)}")
    return [*project["dependencies"], *(each for extra in chosen for each in optional[extra])]


if __name__ == "__main__":
    table = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    print("\n".join(requirements(table, *sys.argv[1:])))
