"""A server whose disk can hang: `python hanging_reads.py FLAG serve ...`. While the file FLAG is there, reads
of weights do not come back, as those of a network file system whose server is gone."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from penstock.memory import direct_io
from penstock_server.cli import main

_read, _never = os.preadv, threading.Event()


def _hang(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
    if Path(sys.argv[1]).exists():
        _never.wait()
    return _read(descriptor, buffers, offset, flags)


if __name__ == "__main__":
    os.preadv = _hang
    # What Linux queues can't be held up here.
    direct_io.is_queued = lambda descriptor: False  # type: ignore[attr-defined]
    sys.exit(main(sys.argv[2:]))
