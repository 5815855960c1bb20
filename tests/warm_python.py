"""Python processes that begin with torch, transformers and Penstock imported. They are forks of one process
that has imported these packages, because the imports take seconds of a processor.

A user's process imports late what these processes have from the start. So the demo server (conftest.py) and
those of test_cli.py are ordinary processes.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

_IMPORTED = (
    "penstock.engine",
    "penstock.unquantized",
    "penstock_server.api.app",
    "penstock_server.commands.batch",
    "penstock_server.serving.serve",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.modeling_utils",
)
_ROOT = Path(__file__).parents[1]
#: Of a message to the first process: a program, and the variables of the environment.
_MOST_BYTES = 1 << 17


def environment() -> dict[str, str]:
    """Ours, with the checkout's packages first and without settings of whoever runs the tests."""
    ours = {name: text for name, text in os.environ.items() if not name.startswith("PENSTOCK_")}
    paths = [str(_ROOT / "engine"), str(_ROOT / "server"), ours.get("PYTHONPATH", "")]
    return ours | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@cache
def _first_process() -> socket.socket:
    """The channel to the process that is forked. The process ends with the channel."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        subprocess.Popen(
            [sys.executable, "-P", __file__, str(its.fileno())], pass_fds=[its.fileno()], env=environment()
        )
    return mine


class WarmProcess:
    """`python *words`: the words are `-m MODULE ...` or `-c PROGRAM ...`. Has what ServerProcess needs of a
    subprocess.Popen."""

    def __init__(self, *words: str) -> None:
        pipes = [os.pipe() for _ in range(3)]
        job = {"words": words, "env": environment(), "folder": os.getcwd()}
        socket.send_fds(_first_process(), [json.dumps(job).encode()], [pipe[1] for pipe in pipes])
        for _, its in pipes:
            os.close(its)
        self.stdout, self.stderr, self._keeper = (os.fdopen(mine) for mine, _ in pipes)
        self.pid = int(self._keeper.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while the process runs."""
        if self.returncode is None:
            poller = select.poll()
            poller.register(self._keeper, select.POLLIN)
            if poller.poll(0):
                self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            with self._keeper:
                self.returncode = int(self._keeper.readline())
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_warm(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs a WarmProcess to its end."""
    process = WarmProcess(*words)
    with ThreadPoolExecutor(1) as thread, process.stdout as stdout, process.stderr as stderr:
        errors, output = thread.submit(stderr.read), stdout.read()
        return subprocess.CompletedProcess(words, process.wait(), output, errors.result())


def _receive(channel: socket.socket) -> dict[str, object]:
    """Forks for each job. Returns the job in the process that has it to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest gets it, too
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, pipes, *_ = socket.recv_fds(channel, _MOST_BYTES, 3)
        if not message:
            raise SystemExit
        if os.fork() == 0:
            channel.close()
            _fork_and_keep(*pipes)
            return json.loads(message)
        for pipe in pipes:
            os.close(pipe)


def _fork_and_keep(stdout: int, stderr: int, keeper: int) -> None:
    """Returns in a fork. The process itself tells the number of the fork, and waits for its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if child := os.fork():
        os.close(stdout)
        os.close(stderr)
        os.write(keeper, b"%d\n" % child)
        os.write(keeper, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.close(keeper)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), stdout, stderr)):
        os.dup2(file, number)
        os.close(file)
    # Those of before know whether their files, and not the pipes, can be sought in.
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def _work(words: list[str], env: dict[str, str], folder: str) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    kind, what, *arguments = words
    if kind == "-m":
        sys.argv = ["", *arguments]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *arguments]
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is imported stays where it is: forks share its pages
    ctypes.CDLL(None).malloc_trim(0)
    _work(**_receive(socket.socket(fileno=int(sys.argv[1]))))  # type: ignore[arg-type]
