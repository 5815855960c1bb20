"""TextProcess: does what model files ask for in a process of its own, which may be lost.

A template is a program of the model's files. It may loop, or write without end, perhaps for some messages
only, and nothing can stop a thread that runs it. So the process text_worker.py runs it, and is ended when a
rendering takes too much time or memory. The next rendering starts it again. Rules of tokenizers are tried
there, too."""

from __future__ import annotations

import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import RequestFailed

#: Limits of a rendering: processor seconds and bytes, and what is added for each byte of the messages. A
#: conversation of a megabyte takes 0.1 s with Qwen3's template, and 10 bytes for each of its own.
MAX_SECONDS, MAX_BYTES = 2.0, 64 << 20
_SECONDS_PER_BYTE, _BYTES_PER_BYTE = 2e-6, 24
#: Seconds after which a silent process counts as lost, even on a slow machine.
_PATIENCE_S = 60.0
#: The status with which the process ends where a request took more memory than it may.
OUT_OF_MEMORY = 77
#: Whose a character of a rendered text is: of a message, or of the template.
FOREIGN, OWN = 0, 1
#: How the process ends over a request that takes too much: by its timer, or where memory runs out in Python,
#: in native code, or on the machine.
_TOO_MUCH = frozenset(
    (OUT_OF_MEMORY, -signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGKILL)
)
#: Bytes of the process's last words that are read.
_MAX_WORDS = 4096
_ROOT = Path(__file__).resolve().parents[2]
_START = (
    f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from penstock.text.text_worker import serve; "
    "serve(sys.stdin.buffer, sys.stdout.buffer)"
)


@dataclass(frozen=True)
class Rendering:
    """What a template gets."""

    template: str
    messages: Sequence[Mapping[str, Any]]
    #: The names of the tokenizer's special tokens, which are the template's own.
    special_tokens: Mapping[str, str]
    #: The other variables.
    variables: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool


@dataclass(frozen=True)
class Trial:
    """A text, and rules of a tokenizer that are to be tried with it (foreign_rules.py)."""

    rules: str
    text: str


class TextLost(Exception):
    """A request took too much time or memory, and the process ended over it."""


class TextProcess:
    """Safe from any thread: one request at a time. The process starts with the first request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        #: A file in memory, for what the process writes to stderr.
        self._errors = -1
        self._finalizer: weakref.finalize[..., TextProcess] | None = None

    def render(
        self, asked: Rendering, check_length: Callable[[int], None] = lambda num_chars: None
    ) -> tuple[str, bytes]:
        """What a template writes, and the origin of each character (traced_text.py).

        check_length: gets the number of characters before the text is fetched; what it raises is passed on.
        Raises TextLost for a rendering that met a limit, ValueError with the template's own words, and
        RequestFailed if no process can be started, or it ends for another reason.
        """
        try:
            data = pickle.dumps(asked)
        except Exception as error:  # any object can refuse to be pickled
            raise ValueError(f"they hold what is no JSON: {error}") from error
        with self._lock:
            sign, num_chars = self._ask(data)
            if sign == b"+":
                check_length(num_chars)
            self._send(pickle.dumps("text"))
            text = self._read_frame().decode("utf-8", "surrogatepass")
            origins = self._read_frame()
        if sign == b"-":
            raise ValueError(text)
        return text, origins

    def try_rules(self, trial: Trial) -> None:
        """Raises TextLost where the rules take too much time or memory with the text, and RequestFailed if no
        process can be started, or it ends for another reason."""
        with self._lock:
            sign, _ = self._ask(pickle.dumps(trial))
        if sign == b"-":  # a panic: here it could leave a thread that waits for ever
            raise TextLost

    def _ask(self, data: bytes) -> tuple[bytes, int]:
        """The sign of success and the number of characters."""
        seconds = MAX_SECONDS + _SECONDS_PER_BYTE * len(data)
        most_bytes = MAX_BYTES + _BYTES_PER_BYTE * len(data)
        self._send(pickle.dumps((seconds, most_bytes)), data)
        sign, num_chars = struct.unpack("<cQ", self._read(9))
        return sign, num_chars

    def close(self) -> None:
        """End the process. Idempotent."""
        with self._lock:
            self._end()

    def _send(self, *parts: bytes) -> None:
        if self._process is not None and self._process.poll() is not None:
            self._end()  # it ended while it had nothing to do
        pipe = (self._process or self._start()).stdin
        assert pipe is not None
        os.ftruncate(self._errors, 0)  # the words of earlier panics
        try:
            for data in parts:
                pipe.write(struct.pack("<Q", len(data)))
                pipe.write(data)
            pipe.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _read_frame(self) -> bytes:
        return self._read(struct.unpack("<Q", self._read(8))[0])

    def _read(self, number: int) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        pipe = self._process.stdout.fileno()  # read without a buffer, since poll() sees none
        data = bytearray()
        while len(data) < number:
            if not _has_answer(pipe):
                self._end()
                raise TextLost
            part = os.read(pipe, number - len(data))
            if not part:
                raise self._ended()
            data += part
        return bytes(data)

    def _ended(self) -> TextLost | RequestFailed:
        """Why the process has ended by itself."""
        assert self._process is not None
        try:
            status = self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL  # by _end()
        words = _last_line(self._errors)
        self._end()
        if status in _TOO_MUCH:
            return TextLost()
        return RequestFailed(f"the process that renders chat templates ended with status {status}: {words}")

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            errors = os.memfd_create("errors")
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START],
                # One thread: the others of the package tokenizers wait for ever after a panic of one.
                env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is for the server, which ends the process
            )
        except OSError as error:
            raise RequestFailed(f"the process that renders chat templates can't start: {error}") from error
        self._errors = errors
        self._finalizer = weakref.finalize(self, _kill, self._process, errors)
        return self._process

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


_of_thread = threading.local()


def text_process() -> TextProcess:
    """The process of the thread that asks, which all models share. A text of one thread does not wait for
    another thread's. The process ends with its thread, or with the program."""
    if not hasattr(_of_thread, "process"):
        _of_thread.process = TextProcess()
    process: TextProcess = _of_thread.process
    return process


def _has_answer(pipe: int) -> bool:
    poller = select.poll()  # select.select() refuses descriptors from 1024 on; a server can have more
    poller.register(pipe, select.POLLIN)
    return bool(poller.poll(1000 * _PATIENCE_S))


def _last_line(file: int) -> str:
    end = os.fstat(file).st_size
    words = os.pread(file, _MAX_WORDS, max(0, end - _MAX_WORDS)).decode(errors="replace").strip("\0 \n")
    return words.rpartition("\n")[2] or "it said nothing"


def _kill(process: subprocess.Popen[bytes], errors: int) -> None:
    process.kill()
    process.communicate()  # closes the pipes and waits
    os.close(errors)
