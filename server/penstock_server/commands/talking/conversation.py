"""Conversation: the messages of a chat in the terminal, and the engine that answers them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from penstock import Engine, GenerationRequest, SamplingParams, render_chat
from penstock.errors import RequestError
from penstock_server.commands.talking.answering import REQUEST_ID, answer


class Conversation:
    """The messages of a chat, and the engine that answers them."""

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None) -> None:
        self._engine = engine
        self._params = params
        self.system = system or ""
        self._messages: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """The system's message, if there is one, and all others."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self._messages]

    @property
    def is_empty(self) -> bool:
        return not self._messages

    def reset(self) -> None:
        self._messages = []

    def say(self, text: str) -> None:
        """Prints the answer to `text`. A message that the model can't take is reported and forgotten."""
        before = self._messages
        self._messages = [*before, {"role": "user", "content": text}]
        try:
            token_ids = render_chat(self._engine.tokenizer, self.messages)
            answered = answer(self._engine, GenerationRequest(token_ids, self._params, REQUEST_ID))
        except RequestError as error:
            self._messages = before
            print(f"{error} (/reset begins anew)", file=sys.stderr)
            return
        self._messages.append({"role": "assistant", "content": answered.text})
        print(answered, file=sys.stderr)

    def retry(self) -> None:
        """Answers the last message anew. There has to be one."""
        *self._messages, question, _ = self._messages
        self.say(question["content"])

    def save(self, path: Path) -> None:
        """Writes the messages as JSON, as the field `messages` of a request has them. Raises OSError, also if
        there is a file already."""
        with path.open("x", encoding="utf-8") as file:
            json.dump({"messages": self.messages}, file, ensure_ascii=False, indent=1)
            file.write("\n")
