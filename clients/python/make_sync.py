"""Makes penstock_client/_sync, the half of the client that blocks, from penstock_client/_async.

python clients/python/make_sync.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import unasync

#: Names that begin with Async in _async.
CLASSES = (
    "Batch",
    "Blocks",
    "Client",
    "HTTPClient",
    "Session",
    "Sleep",
    "Stream",
    "StreamReply",
    "Transport",
)
WORDS = {
    "_async": "_sync",
    "aclose": "close",
    "aclosing": "closing",
    "aiter_bytes": "iter_bytes",
    "anext": "next",
    "aread": "read",
    "async_batch": "batch",
    "asyncio": "time",
} | {f"Async{name}": name for name in CLASSES}


def make(package: Path) -> None:
    """Writes package/_sync, as ruff writes it."""
    made = package / "_sync"
    unasync.unasync_files(
        [str(path) for path in (package / "_async").glob("*.py")],
        [unasync.Rule("/_async/", "/_sync/", WORDS)],
    )
    for path in made.glob("*.py"):
        path.write_text(f"# Made from _async/{path.name} by make_sync.py; edit that.\n{path.read_text()}")
    ruff = [sys.executable, "-m", "ruff"]
    config = ["--config", str(Path(__file__).with_name("pyproject.toml")), "--no-cache", "--quiet"]
    subprocess.run([*ruff, "check", *config, "--select", "I", "--fix", made], check=True)
    subprocess.run([*ruff, "format", *config, made], check=True)


if __name__ == "__main__":
    make(Path(__file__).parent / "penstock_client")
