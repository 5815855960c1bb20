"""Libraries that tests compile. Processes of one run of the tests share them: each is compiled once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

#: The variable that names the folder of the run (tests/conftest.py).
FOLDER = "TESTS_COMPILED_FOLDER"


def compiled(command: Sequence[str], source: str, suffix: str, libraries: Sequence[str] = ()) -> Path:
    """The library (or program) that a command makes of a text, which it gets as a file with this suffix. A
    compiler that says anything fails."""
    folder = Path(os.environ.get(FOLDER) or tempfile.mkdtemp(prefix="penstock-compiled-"))
    name = hashlib.sha256("\0".join([*command, source]).encode()).hexdigest()[:16]
    built, text = folder / f"{name}.so", folder / f"{name}{suffix}"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            text.write_text(source)
            part = built.with_suffix(".part")
            done = subprocess.run(
                [*command, str(text), *libraries, "-o", str(part)], capture_output=True, text=True
            )
            assert done.returncode == 0 and not done.stderr, done.stderr
            part.rename(built)
    return built
