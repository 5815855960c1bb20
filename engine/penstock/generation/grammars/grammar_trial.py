"""GrammarTrial: finds out, in a process of its own, whether a grammar can be read.

llguidance reads a grammar by recursion and without a limit on time. A chain of some thousand rules overflows
the stack, which ends the process; {"multipleOf": 99999989} takes memory and time without end. Clients write
grammars, so each grammar is read first by a process that may be lost. That process runs this file alone:
importing the rest of the package would take seconds.
"""

from __future__ import annotations

import json
import pickle
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import IO, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

#: Optional properties of an object that may come next: llguidance has four items for each in a row.
MAX_OPTIONAL = 1000
#: A lexer state takes 1-2 kB; a request's answers share their states. The other limits are llguidance's
#: defaults, with which a step's mask takes tens of microseconds, and some 20 ms at worst.
LIMITS = LLParserLimits(max_lexer_states=50_000, max_items_in_row=4 * MAX_OPTIONAL, verbose_errors=False)

#: Limits of a trial: processor seconds, and bytes beyond what the vocabulary takes. A schema of 1000
#: properties takes 0.2 s.
MAX_SECONDS, MAX_BYTES = 1.0, 256 << 20
#: Stack of the thread that reads. Threads usually have four times as much, so a grammar that passes the trial
#: does not overflow another thread's stack.
_STACK_BYTES = 2 << 20
#: Seconds after which a silent process counts as lost, even on a slow machine.
_PATIENCE_S = 60.0
_READY, _PASSED = b".", b"+"


def source(kind: str, text: str) -> str:
    """A Grammar in llguidance's own format. Raises ValueError."""
    match kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})
        case "regex":
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, 'dws')}/")
        case "choice":
            texts: list[Any] = json.loads(text)
            # One lexeme: as rules, each text would be an item of a row, of which there are few.
            choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
    return LLMatcher.grammar_from_lark(text)


class GrammarTrial:
    """Trials with one vocabulary. Safe from any thread. The process starts with the first grammar, and starts
    again after a grammar that ended it."""

    def __init__(
        self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int | None, ends: list[int]
    ) -> None:
        """tokens: the bytes of each token. The other arguments are as in llguidance's TokenizerWrapper."""
        self._vocabulary = pickle.dumps((tokens, special_token_ids, eos_token_id, ends))
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., GrammarTrial] | None = None

    def passes(self, kind: str, text: str) -> bool:
        """Whether a grammar was read within the limits, with or without an error. Raises OSError if nothing
        can be tried."""
        with self._lock:
            process = self._process or self._start()
            assert process.stdin is not None and process.stdout is not None
            try:
                _send(process.stdin, pickle.dumps((kind, text)))
                has_passed = _reply(process.stdout) == _PASSED
            except BrokenPipeError:
                has_passed = False
            if not has_passed:
                self._end()
            return has_passed

    def close(self) -> None:
        """End the process. Idempotent."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        process = self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the limits end the process, which is no error
            start_new_session=True,  # Ctrl-C is for the server, which ends the process
        )
        self._finalizer = weakref.finalize(self, _kill, process)
        assert process.stdin is not None and process.stdout is not None
        try:
            _send(process.stdin, self._vocabulary)
            is_ready = _reply(process.stdout) == _READY
        except BrokenPipeError:
            is_ready = False
        if not is_ready:
            self._end()
            raise OSError(
                "the process that reads grammars did not start; the machine may be out of memory or processes"
            )
        return process

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()  # closes the pipes and waits


def _reply(pipe: IO[bytes]) -> bytes:
    """One byte. Empty if the process ended or said nothing in time."""
    poller = select.poll()  # select.select() refuses descriptors from 1024 on; a server can have more
    poller.register(pipe, select.POLLIN)
    return pipe.read(1) if poller.poll(1000 * _PATIENCE_S) else b""


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(struct.pack("<Q", len(data)) + data)
    pipe.flush()


# ------------------------------------------------------------ the process


def _receive(pipe: IO[bytes]) -> Any:
    """The next message. None at the end."""
    head = pipe.read(8)
    return pickle.loads(pipe.read(struct.unpack("<Q", head)[0])) if len(head) == 8 else None


class _Vocabulary:
    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int | None, ends: list[int]
    ) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_token_ids, eos_token_id
        self.tokenizer = LLTokenizer(self, eos_token=ends or None)  # type: ignore[arg-type]

    def __call__(self, text: str) -> list[int]:
        return self.tokenizer.greedy_tokenize(text)


def _try(vocabulary: _Vocabulary, kind: str, text: str) -> None:
    """Do what the steps of an answer do until there is something to choose."""
    try:
        matcher = LLMatcher(vocabulary.tokenizer, source(kind, text), log_level=0, limits=LIMITS)
        while forced := matcher.compute_ff_tokens():
            if not matcher.consume_tokens(forced):
                break
        matcher.compute_bitmask()
    except ValueError:
        pass  # the engine meets the same error and reports it


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _STACK_BYTES + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    vocabulary = _Vocabulary(*_receive(requests))
    threading.stack_size(_STACK_BYTES)
    _limit_memory()
    answers.write(_READY)
    answers.flush()
    while (grammar := _receive(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)  # its signal ends the process
        thread = threading.Thread(target=_try, args=(vocabulary, *grammar))
        thread.start()
        thread.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(_PASSED)
        answers.flush()


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
