"""What the user types: messages of one or more lines, with the editing and the history of readline."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from penstock.errors import ConfigError

readline: ModuleType | None
try:
    import readline
except ImportError:  # some builds of Python come without it
    readline = None

#: Lines of the history that are kept.
MOST_LINES = 1000
BLOCK = '"""'


@contextlib.contextmanager
def with_history(path: Path) -> Iterator[None]:
    """Inside this context input() has the lines that were typed in earlier conversations. The file at `path`,
    which its owner alone can read, keeps them; a file that can't be read or written is left out."""
    if readline is None:
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(MOST_LINES)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)


def typed_text(text: str | None) -> str:
    """The text of a flag, or of stdin if the flag was not given. Bytes that are no text become U+FFFD. Raises
    ConfigError if there is neither."""
    if text is None:
        if sys.stdin is None:
            raise ConfigError("there is no text: stdin is closed, and no flag has one")
        text = sys.stdin.read()
    # Python has such bytes of the command line as lone surrogates, which no tokenizer takes.
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def messages() -> Iterator[str]:
    """The messages that the user types, until the end of input, or Ctrl-C at an empty prompt. Ctrl-C clears
    what is typed so far."""
    while True:
        try:
            yield _message()
        except EOFError:
            print()
            return
        except KeyboardInterrupt as interrupt:
            print()
            if not (interrupt.args or _typed()):
                return


def _message() -> str:
    """One message. Raises EOFError; and KeyboardInterrupt, with an argument if lines of a message were read
    already."""
    text = input("> ").strip()
    try:
        if text.startswith(BLOCK):
            return _block(text.removeprefix(BLOCK))
        while text.endswith("\\"):
            text = f"{text.removesuffix(chr(92))}\n{input('. ').rstrip()}"
    except KeyboardInterrupt:
        raise KeyboardInterrupt("a message was begun") from None
    return text.strip()


def _block(first: str) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(BLOCK):
        lines.append(input(". "))
    return "\n".join(lines).rstrip().removesuffix(BLOCK).strip()


def _typed() -> str:
    """What stands in the line that is being typed."""
    return str(readline.get_line_buffer()) if readline is not None else ""
