"""How the process of a command begins and ends: quietly, and at once. Imports nothing before main() runs, so
that Ctrl-C in the seconds of imports is no traceback."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Runs the command of sys.argv, and returns the exit code if that is 0. Any other code ends the process
    here: a thread that still imports what nobody needs any more would keep it alive for seconds."""
    try:
        code = _run()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # nobody reads the error either
        code = 1
    if code:
        _leave(code)
    return code


def _run() -> int:
    try:
        from penstock_server.cli import main as run

        return run()
    except SystemExit as leaving:  # argparse's
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        raise


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:  # nobody reads it
            pass
    os._exit(code)
