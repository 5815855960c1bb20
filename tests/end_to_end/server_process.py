"""A real server process: `python -m penstock_server serve ...`, started, watched and ended."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

from warm_python import WarmProcess, environment


def _cold_process(*words: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *words], stdout=pipe, stderr=pipe, text=True, env=environment())


class ServerProcess:
    """Use it in a `with`. port: 0 takes a free one; `url` is known at once, `wait_until_ready` waits.
    is_warm: see warm_python.py."""

    def __init__(
        self,
        *arguments: str,
        port: int = 0,
        is_warm: bool = True,
        program: tuple[str, ...] = ("-m", "penstock_server"),
    ) -> None:
        words = (*program, "serve", *arguments, "--port", str(port))
        self._process = WarmProcess(*words) if is_warm else _cold_process(*words)
        self.log: list[str] = []
        self.greeting: list[str] = []
        self.url = self._find_url(self._lines_of_log())
        self._reader = threading.Thread(target=lambda: list(self._lines_of_log()), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

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
