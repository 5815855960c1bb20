"""Dialogue: what the user types in `penstock chat`: messages, and commands that begin with a slash."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from penstock_server.commands.talking.conversation import Conversation

_HELP = """/help          this list
/system TEXT   what the model is told first; without TEXT: shows it
/retry         answers the last message anew
/save FILE     writes the conversation as JSON
/reset         begins anew
/quit          ends, as Ctrl-D does
A line that ends with \\ goes on in the next line. Lines between \"\"\" and \"\"\" are one message.
Two slashes begin a message that begins with one. Ctrl-C ends an answer, or clears what is typed."""


class Dialogue:
    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: _tell(_HELP),
            "/system": self._system,
            "/retry": lambda _: self._retry(),
            "/save": self._save,
            "/reset": lambda _: conversation.reset(),
        }

    def hold(self, lines: Iterable[str]) -> None:
        """Answers messages and does commands until the lines end, or /quit."""
        for line in lines:
            if line == "/quit":
                return
            if line.startswith("/") and not line.startswith("//"):
                self._do(line)
            elif line:
                self._conversation.say(line.removeprefix("/") if line.startswith("//") else line)

    def _do(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        command = self._commands.get(name)
        if command is None:
            _tell(f"There is no {name}; /help lists what there is.")
        else:
            command(rest.strip())

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = text
        _tell(self._conversation.system or "The model is told nothing; /system TEXT tells it TEXT.")

    def _retry(self) -> None:
        if self._conversation.is_empty:
            _tell("There is no message to answer anew.")
        else:
            self._conversation.retry()

    def _save(self, name: str) -> None:
        if not name:
            return _tell("Name a file: /save FILE")
        try:
            self._conversation.save(Path(name).expanduser())
            _tell(f"Saved to {name}.")
        except OSError as error:
            _tell(f"{name} can't be written: {error.strerror}.")


def _tell(text: str) -> None:
    print(text, file=sys.stderr)
