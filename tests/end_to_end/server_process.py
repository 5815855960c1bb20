"""A real server process: `python -m penstock_server serve ...`, started, watched and ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "penstock_server", *arguments]


def environment() -> dict[str, str]:
    """Ours, with the checkout's packages first and without settings of whoever runs the tests."""
    ours = {name: text for name, text in os.environ.items() if not name.startswith("PENSTOCK_")}
    paths = [str(_ROOT / "engine"), str(_ROOT / "server"), ours.get("PYTHONPATH", "")]
    return ours | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


class ServerProcess:
    """Use it in a `with`. port: 0 takes a free one; `url` is known at once, `wait_until_ready` waits."""

    def __init__(self, *arguments: str, port: int = 0) -> None:
        self._process = subprocess.Popen(
            command("serve", *arguments, "--port", str(port)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self.log: list[str] = []
        self.greeting: list[str] = []
        self.url = self._find_url(self._lines_of_log())
        self._reader = threading.Thread(target=lambda: list(self._lines_of_log()), daemon=True)
        self._reader.start()

    def _lines_of_log(self) -> Iterator[str]:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log.append(line)
            yield line

    def _find_url(self, lines: Iterator[str]) -> str:
        for line in lines:
            if match := re.search(r"listening at (\S+);", line):
                return match[1]
        raise RuntimeError("the server ended before it listened:\n" + "".join(self.log))

    def wait_until_ready(self) -> ServerProcess:
        """Raises RuntimeError with the log if the process ends instead."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.greeting.append(line)
            if line.startswith("  "):  # the command to try, at its end
                return self
        self._reader.join()
        raise RuntimeError("the server is not ready:\n" + "".join(self.log))

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Sends the signal and waits for the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(number)
        code = self._process.wait()
        self._reader.join()
        return code

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
