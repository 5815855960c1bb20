"""GrammarTrial: finds out, in a process of its own, whether a grammar can be read.

llguidance reads a grammar by recursion and without a limit on time. A chain of some thousand rules overflows
the stack, which ends the process; {"multipleOf": 99999989} takes memory and time without end. Clients write
grammars, so each grammar is read first by a process that may be lost. That process runs this file alone:
importing the rest of the package would take seconds. It reads the vocabulary once, and forks for each
grammar: a grammar that ends its process holds up no other one.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

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
#: Walks through a grammar, the most choices of one, and the processor seconds after which it chooses no more:
#: limits may be met deep within an answer.
_NUM_WALKS, _NUM_CHOICES, _WALK_S = 6, 64, 0.05
#: Bytes that lead through JSON: to the next member or element, to large numbers, and to the end. The first
#: walk takes them in this order, the second in the other.
_LEADING = b'",9876543210]}'


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
    """Trials with one vocabulary. Safe from any thread. The process starts with the first grammar."""

    def __init__(
        self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int | None, ends: list[int]
    ) -> None:
        """tokens: the bytes of each token. The other arguments are as in llguidance's TokenizerWrapper."""
        self._vocabulary = pickle.dumps((tokens, special_token_ids, eos_token_id, ends))
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._finalizer: weakref.finalize[..., GrammarTrial] | None = None

    def passes(self, kind: str, text: str) -> bool:
        """Whether a grammar was read and walked through within the limits, with or without an error that was
        found at once. Raises OSError if nothing can be tried."""
        own, other = socket.socketpair()
        with own:
            with other, self._lock:
                process = self._process or self._start()
                assert self._control is not None
                try:
                    socket.send_fds(self._control, [b"."], [other.fileno()])
                except OSError:
                    self._end()
                    raise
            try:
                _send(own, pickle.dumps((kind, text)))
                has_passed = _reply(own) == _PASSED
            except (BrokenPipeError, ConnectionResetError):
                has_passed = False
        if not has_passed and process.poll() is not None:
            with self._lock:
                if self._process is process:
                    self._end()
            raise OSError("the process that reads grammars has ended; ask again")
        return has_passed

    def close(self) -> None:
        """End the process. Idempotent."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        control, other = socket.socketpair()
        with other:
            process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).resolve())],
                stdin=other.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # the limits end the trials, which is no error
                start_new_session=True,  # Ctrl-C is for the server, which ends the process
            )
        self._process, self._control = process, control
        self._finalizer = weakref.finalize(self, _kill, process, control)
        try:
            _send(control, self._vocabulary)
            is_ready = _reply(control) == _READY
        except (BrokenPipeError, ConnectionResetError):
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
        self._process = self._control = self._finalizer = None


def _kill(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()


def _reply(connection: socket.socket) -> bytes:
    """One byte. Empty if the process ended or said nothing in time."""
    poller = select.poll()  # select.select() refuses descriptors from 1024 on; a server can have more
    poller.register(connection, select.POLLIN)
    return connection.recv(1) if poller.poll(1000 * _PATIENCE_S) else b""


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(struct.pack("<Q", len(data)) + data)


# ------------------------------------------------------------ the process


def _receive(pipe: io.BufferedReader) -> Any:
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
        #: The tokens of one byte each.
        self.ids = {each[0]: token_id for token_id, each in enumerate(tokens) if len(each) == 1}

    def __call__(self, text: str) -> list[int]:
        return self.tokenizer.greedy_tokenize(text)


class _LimitMet(Exception):
    pass


def _try(vocabulary: _Vocabulary, kind: str, text: str) -> None:
    """Do what the steps of an answer do until there is something to choose, and then what they may do with
    some choices. Raises _LimitMet where an answer that has begun would end with an error."""
    try:
        matcher = LLMatcher(vocabulary.tokenizer, source(kind, text), log_level=0, limits=LIMITS)
    except ValueError:
        return  # the engine meets the same error and reports it
    _follow_forced(matcher)
    matcher.compute_bitmask()
    if matcher.get_error():
        return
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    for number in range(_NUM_WALKS):
        _walk(matcher.deep_copy(), vocabulary, number)


def _follow_forced(matcher: Any) -> None:
    while forced := matcher.compute_ff_tokens():
        if not matcher.consume_tokens(forced):
            break


def _walk(matcher: Any, vocabulary: _Vocabulary, number: int) -> None:
    """One answer, or its beginning. Raises _LimitMet."""
    draws, end_s = random.Random(number), time.process_time() + _WALK_S
    for _ in range(_NUM_CHOICES):
        mask = matcher.compute_bitmask()  # bit i of all its bytes: token i may come next
        if matcher.get_error():
            raise _LimitMet
        allowed = [
            byte for byte, token_id in vocabulary.ids.items() if mask[token_id >> 3] >> (token_id & 7) & 1
        ]
        leading = [byte for byte in _LEADING if byte in allowed] or allowed
        if not leading or time.process_time() > end_s:
            return
        byte = leading[-number] if number < 2 else draws.choice(leading)
        matcher.consume_token(vocabulary.ids[byte])
        _follow_forced(matcher)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _STACK_BYTES + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _serve(control: socket.socket) -> None:
    """Forks for each connection that comes, until nobody is left who sends any."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forked processes
    with control.makefile("rb") as stream:  # nothing else comes until the vocabulary was read
        vocabulary = _Vocabulary(*_receive(stream))
    threading.stack_size(_STACK_BYTES)
    control.sendall(_READY)
    while (received := socket.recv_fds(control, 1, 1))[0]:
        with socket.socket(fileno=received[1][0]) as connection:
            if os.fork() == 0:
                control.close()
                _answer(connection, vocabulary)
                os._exit(0)


def _answer(connection: socket.socket, vocabulary: _Vocabulary) -> None:
    """One trial."""
    with connection.makefile("rb") as stream:
        grammar = _receive(stream)
    if grammar is None:
        return
    has_passed = []

    def work() -> None:
        try:
            _try(vocabulary, *grammar)
        except _LimitMet:
            return
        has_passed.append(True)

    _limit_memory()
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)  # its signal ends the process
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if has_passed:
        connection.sendall(_PASSED)


if __name__ == "__main__":
    _serve(socket.socket(fileno=sys.stdin.fileno()))
