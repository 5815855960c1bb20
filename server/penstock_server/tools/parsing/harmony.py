"""HarmonyParser: gpt-oss' answers, which are messages on channels:

    <|channel|>analysis<|message|>...<|end|>                                   reasoning
    <|start|>assistant<|channel|>final<|message|>...<|return|>                 the answer
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>commentary<|message|>...<|end|>               text for the user, before calls

A message ends with any of <|end|>, <|call|> and <|return|>, or where another message begins."""

from __future__ import annotations

import re
from collections.abc import Collection

from penstock_server.tools.parsers import AnswerParser
from penstock_server.tools.parsing.thinking import overlap
from penstock_server.tools.reading import ArgumentsPiece, CallBegin, Event, ReasoningPiece, merge

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MARKS = (START, CHANNEL, *_ENDS)
_RECIPIENT = re.compile(r"to=([\w.-]+)")
_FUNCTIONS = "functions."
#: A longer head is no head.
_MAX_HEAD = 300


class HarmonyParser:
    """The parser of one answer. The prompt ends with <|start|>assistant."""

    def __init__(self, inner: AnswerParser, functions: Collection[str] | None) -> None:
        """inner: reads the text of the final channel. functions: the names of functions, messages to which
        are calls; None: such messages are text. A message to another tool, such as the model's own python or
        container.exec, is left out."""
        self._inner = inner
        self._functions = functions
        self._pending = ""
        self._is_in_head = True
        self._kind = "final"
        #: The kinds of messages that have had text, and whether the present message has had some.
        self._told: set[str] = set()
        self._is_told = False
        self.is_thinking = False

    def feed(self, text: str) -> list[Event]:
        self._pending += text
        return self._go_on(is_final=False)

    def finish(self) -> list[Event]:
        return merge([*self._go_on(is_final=True), *self._inner.finish()])

    def _go_on(self, is_final: bool) -> list[Event]:
        events: list[Event] = []
        while self._pending:
            step = self._take_head(is_final) if self._is_in_head else self._take_body(is_final)
            if step is None:
                break
            events += step
        return merge(events)

    # -- heads ----------------------------------------------------------------------------------

    def _take_head(self, is_final: bool) -> list[Event] | None:
        """Takes a message's head, up to <|message|>. Text without any mark is no head, but an answer."""
        head, found, rest = self._pending.partition(MESSAGE)
        if found:
            self._pending, self._is_in_head = rest, False
            return self._begin(head)
        has_mark = any(
            mark.startswith(head.strip()[: len(mark)]) for mark in (CHANNEL, START, *_ENDS, MESSAGE)
        )
        is_head = has_mark or head.lstrip().startswith("to=") or "to=".startswith(head.strip())
        if is_head and len(head) <= _MAX_HEAD and not is_final:
            return None
        if is_head and is_final:
            self._pending = ""  # an answer that is cut off within a head
            return []
        self._is_in_head, self._kind = False, "final"
        return []

    def _begin(self, head: str) -> list[Event]:
        channel = head.rpartition(CHANNEL)[2].split() if CHANNEL in head else ["final"]
        name = channel[0].partition("<")[0] if channel else "final"
        recipient = _RECIPIENT.search(head)
        self.is_thinking = self._is_told = False
        to = recipient[1] if recipient else "assistant"
        if self._functions is not None and (to.startswith(_FUNCTIONS) or to in self._functions):
            self._kind = "call"
            return [CallBegin(to.removeprefix(_FUNCTIONS))]
        if to != "assistant" and not to.startswith(_FUNCTIONS):
            self._kind = "left out"
            return []
        self._kind = "reasoning" if name == "analysis" else "final"
        self.is_thinking = self._kind == "reasoning"
        return []

    # -- bodies ---------------------------------------------------------------------------------

    def _take_body(self, is_final: bool) -> list[Event] | None:
        found = [(place, mark) for mark in _MARKS if (place := self._pending.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            text = self._pending[:place]
            self._pending = self._pending[place + (len(mark) if mark in _ENDS else 0) :]
            self._is_in_head = True
            events = self._tell(text)
            self.is_thinking = False
            return events
        held = 0 if is_final else max(overlap(self._pending, mark) for mark in _MARKS)
        text = self._pending[: len(self._pending) - held]
        self._pending = self._pending[len(text) :]
        return self._tell(text) if text else None

    def _tell(self, text: str) -> list[Event]:
        if self._kind == "call":
            return [ArgumentsPiece(text)]
        if not text or self._kind == "left out":
            return []
        if not self._is_told and self._kind in self._told:
            text = "\n" + text  # messages of one kind are lines of one text
        self._is_told = True
        self._told.add(self._kind)
        return [ReasoningPiece(text)] if self._kind == "reasoning" else self._inner.feed(text)
