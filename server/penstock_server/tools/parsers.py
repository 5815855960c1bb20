"""Finds the tool calls in an answer: one parser per format that models are trained to write.

    Hermes, Qwen 2.5 and 3    <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number
    Llama 3                   {"name": ..., "parameters": {...}}, after <|python_tag|> or as the whole
                              answer; several between semicolons
    Mistral                   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], and since 2025
                              [TOOL_CALLS]name{...} or [TOOL_CALLS]name[CALL_ID]id[ARGS]{...}, any number
    MiniCPM5                  XML, in minicpm5_parser.py
    GLM-4.5, Qwen3-Coder, MiniMax-M2, DeepSeek, gpt-oss     in the room parsing

A parser gets the answer in pieces, and returns the events that are certain. The events depend on the whole
text alone, and not on how it was cut into pieces. Text that looked like a call and is none is returned as
text; only white space beside calls and the formats' own marks are dropped. A call that is cut off ends where
the answer ends; in a list, a call that is cut off before its arguments is dropped."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Protocol

from penstock_server.tools.reading import (
    ArgumentsPiece,
    CallBegin,
    CallReader,
    Event,
    TextPiece,
    ValueReader,
    merge,
)

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
FUNCTION = "<function"


class AnswerParser(Protocol):
    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """The events that were held back. Call finish() once, after the last text."""
        ...


class Parser(ABC):
    """The frame of all parsers. A state is a method that takes what it can from `_pending`, and returns
    whether the next state may go on with the rest."""

    def __init__(self, marker: str = "") -> None:
        self._marker = marker
        self._pending = ""
        self._is_final = False
        self._state: Callable[[], bool] = self._in_text
        self._events: list[Event] = []
        self._call = CallReader()
        #: The text in front of the call that is being read; it is text again if the call turns out to be
        #: none.
        self._opening = ""
        #: Whether a call came last. White space after a call is no text, unless text follows it.
        self._is_after_call = False

    def feed(self, text: str) -> list[Event]:
        self._pending += text
        return self._go_on()

    def finish(self) -> list[Event]:
        self._is_final = True
        return self._go_on()

    def _go_on(self) -> list[Event]:
        while self._state():
            pass
        events, self._events = merge(self._events), []
        return events

    # -- text -----------------------------------------------------------------------------------

    def _in_text(self) -> bool:
        """Takes text up to the marker, without the white space before the marker."""
        before, marker, after = self._pending.partition(self._marker) if self._marker else ("", "", "")
        if marker:
            text = before.rstrip()
            self._tell(text)
            self._pending = after
            self._opening = before[len(text) :] + marker
            self._state = self._after_marker
            return True
        held = 0 if self._is_final else _overlap(self._pending, self._marker)
        certain = self._pending[: len(self._pending) - held].rstrip()
        if self._is_final and not self._is_after_call:
            certain = self._pending
        if certain:
            self._tell(certain)
            self._pending = self._pending[len(certain) :]
        return False

    def _tell(self, text: str) -> None:
        if text:
            self._is_after_call = False
            self._events.append(TextPiece(text))

    @abstractmethod
    def _after_marker(self) -> bool: ...

    # -- a JSON call ----------------------------------------------------------------------------

    def _begin_call(self, known_names: Collection[str] | None = None) -> bool:
        self._call = CallReader(known_names)
        self._state = self._in_call
        return True

    def _in_call(self) -> bool:
        events, self._pending = self._call.feed(self._pending)
        self._events += events
        if self._call.is_over and self._call.has_begun:
            self._is_after_call = True
            self._state = self._after_call
            return True
        if self._call.is_malformed:
            self._give_back(self._call.text)
            return True
        if self._is_final and not self._call.has_begun:
            self._cut_off(self._call.text)
            return True
        return False

    @abstractmethod
    def _after_call(self) -> bool: ...

    def _cut_off(self, text: str) -> None:
        """Handles an answer that ends before it is clear that `text` is a call."""
        self._give_back(text)

    def _give_back(self, text: str = "") -> None:
        """Returns a supposed call as text. What follows it is text too, up to the next marker."""
        self._tell(self._opening + text)
        self._opening = ""
        self._state = self._in_text


class HermesParser(Parser):
    def __init__(self) -> None:
        super().__init__(TOOL_CALL)

    def _after_marker(self) -> bool:
        return self._begin_call()

    def _after_call(self) -> bool:
        """Takes the closing tag, which models forget at times."""
        rest = self._pending.lstrip()
        if rest.startswith(TOOL_CALL_END):
            self._pending = rest.removeprefix(TOOL_CALL_END)
        elif TOOL_CALL_END.startswith(rest):
            if not self._is_final:
                return False
            self._pending = ""  # The answer was cut off within the tag.
        self._state = self._in_text
        return True


class Llama3Parser(Parser):
    """Llama's calls. JSON without the tag is a call only if it names a tool: an answer may be other JSON."""

    _SEPARATOR = re.compile(r"\s*;?\s*")

    def __init__(self, known_names: Collection[str]) -> None:
        super().__init__(PYTHON_TAG)
        self._tool_names = known_names
        self._state = self._at_start

    def _at_start(self) -> bool:
        """The state at the beginning, and after a call: another call may follow, with or without a tag."""
        match = self._SEPARATOR.match(self._pending)
        separator = match[0] if match and self._is_after_call else _leading_whitespace(self._pending)
        rest = self._pending[len(separator) :]
        if rest.startswith("{"):
            self._opening, self._pending = separator, rest
            return self._begin_call(self._tool_names)
        if PYTHON_TAG.startswith(rest) and rest != PYTHON_TAG and not self._is_final:
            return False
        if self._is_after_call and (not rest or rest.startswith(PYTHON_TAG)):
            self._pending = rest
        self._state = self._in_text
        return True

    def _after_marker(self) -> bool:
        return self._begin_call()

    def _after_call(self) -> bool:
        self._state = self._at_start
        return True


class ListParser(Parser):
    """A list of calls, or a single call, as the whole answer: the form of forced calls."""

    def __init__(self, marker: str = "") -> None:
        super().__init__(marker)
        self._is_in_list = False
        if not marker:
            self._state = self._after_marker

    def _after_marker(self) -> bool:
        rest = self._pending.lstrip()
        if not rest:
            if self._is_final:
                self._give_back()
            return self._is_final
        self._is_in_list = rest[0] == "["
        if self._is_in_list:
            self._opening += self._pending[: len(self._pending) - len(rest) + 1]
            self._pending = rest[1:]
            return self._begin_call()
        if rest[0] == "{":
            return self._begin_call()
        return self._without_bracket()

    def _without_bracket(self) -> bool:
        self._give_back()
        return True

    def _cut_off(self, text: str) -> None:
        """Drops the beginning of a further call in a list: nothing else could have followed."""
        if self._is_after_call:
            self._state = self._in_text
        else:
            super()._cut_off(text)

    def _after_call(self) -> bool:
        rest = self._pending.lstrip()
        if self._is_in_list and not rest and not self._is_final:
            return False
        if self._is_in_list and rest[:1] == ",":
            self._opening, self._pending = ",", rest[1:]
            return self._begin_call()
        if self._is_in_list and rest[:1] == "]":
            self._pending = rest[1:]
        self._state = self._in_text
        return True


class MistralParser(ListParser):
    #: The text between the marker and the brace that opens the arguments.
    _HEAD = re.compile(r"\s*([\w.-]{1,128})\s*(?:\[CALL_ID\]\s*([\w-]{1,64})\s*)?(?:\[ARGS\]\s*)?", re.ASCII)
    _HEAD_CHARACTERS = re.compile(r"[\w.\[\]\s-]*", re.ASCII)
    _MAX_HEAD = 250

    def __init__(self) -> None:
        super().__init__(TOOL_CALLS)
        self._arguments = ValueReader()

    def _without_bracket(self) -> bool:
        head, brace, _ = self._pending.partition("{")
        is_possible = len(head) <= self._MAX_HEAD and bool(self._HEAD_CHARACTERS.fullmatch(head))
        if is_possible and not brace and not self._is_final:
            return False
        match = self._HEAD.fullmatch(head) if brace and is_possible else None
        if match is None:
            return super()._without_bracket()
        self._events.append(CallBegin(match[1], match[2]))
        self._pending = self._pending[len(head) :]
        self._arguments = ValueReader()
        self._is_after_call = True
        self._state = self._in_arguments
        return True

    def _in_arguments(self) -> bool:
        num_taken = self._arguments.feed(self._pending)
        taken = self._pending[:num_taken]
        self._events.append(ArgumentsPiece(taken))
        self._pending = self._pending[len(taken) :]
        if num_taken is not None:
            self._state = self._in_text
        return num_taken is not None


class ArgumentsParser:
    """A parser for an answer that is nothing but the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._begin: list[Event] = [CallBegin(name)]

    def feed(self, text: str) -> list[Event]:
        begin, self._begin = self._begin, []
        return merge([*begin, ArgumentsPiece(text)])

    def finish(self) -> list[Event]:
        return self.feed("")


def _leading_whitespace(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def _overlap(text: str, marker: str) -> int:
    """The number of characters at the end of `text` that are a beginning of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
