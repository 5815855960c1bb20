"""Reads one call, {"name": ..., "arguments": {...}}, from an answer that comes in pieces.

What is told depends on the characters alone, never on how they were cut. Arguments are told as they
come, which is why nothing can be taken back: a call begins only when its name is known and its
arguments are, by their first character, an object. Until then it may still turn out to be no call.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass

_WHITESPACE = " \t\r\n"
_FIRST_OF_VALUE = '"{[-0123456789tfn'
#: Models were trained on either word.
_ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(frozen=True)
class TextPiece:
    """Some of what was said beside calls."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    name: str
    #: If the model gave its call one.
    call_id: str | None = None


@dataclass(frozen=True)
class ArgumentsPiece:
    """Some of the arguments of the call that began last, as the model wrote them."""

    text: str


Event = TextPiece | CallBegin | ArgumentsPiece


def merge(events: Iterable[Event]) -> list[Event]:
    """The same with neighbouring pieces as one, and without empty ones."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if not isinstance(event, CallBegin) and not event.text:
            continue
        if isinstance(event, TextPiece) and isinstance(last, TextPiece):
            merged[-1] = TextPiece(last.text + event.text)
        elif isinstance(event, ArgumentsPiece) and isinstance(last, ArgumentsPiece):
            merged[-1] = ArgumentsPiece(last.text + event.text)
        else:
            merged.append(event)
    return merged


class ValueReader:
    """Finds where a JSON value ends. Knows strings and brackets and no more, so that a slip within, such as a
    line end in a string, costs nothing."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._has_begun = False

    def feed(self, text: str) -> int | None:
        """Characters of `text` that belong to the value; None: all, and it goes on."""
        for index, character in enumerate(text):
            if not self._has_begun:
                self._has_begun = True
            elif self._depth == 0 and not self._is_in_string and character in ",]}" + _WHITESPACE:
                return index  # the end of a number or word
            if self._takes_end(character):
                return index + 1
        return None

    def _takes_end(self, character: str) -> bool:
        if self._is_in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._is_in_string = False
                return self._depth == 0
            return False
        if character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False


class CallReader:
    """One call from its opening brace on. Feed it until `is_over`; `is_malformed` then says that what was
    read is no call, unless one `has_begun`."""

    def __init__(self, known_names: Collection[str] | None = None) -> None:
        """known_names: what is not one of these is no call; None: any name will do."""
        self._known_names = known_names
        self.is_over = False
        self.is_malformed = False
        self.has_begun = False
        #: All that was read.
        self.text = ""
        self._awaits = "{"
        self._key = ""
        self._value = ValueReader()
        self._value_text = ""
        self._name: str | None = None
        self._arguments: str | None = None
        self._is_telling = False
        self._events: list[Event] = []

    def feed(self, text: str) -> tuple[list[Event], str]:
        """What the text tells, and what of it is behind the call, once `is_over`."""
        position = 0
        while position < len(text) and not self.is_over:
            if self._awaits in ("key", "value"):
                taken = self._value.feed(text[position:])
                piece = text[position:] if taken is None else text[position : position + taken]
                self._take_value(piece, taken is not None)
                position += len(piece)
            elif self._takes_mark(text[position]):
                position += 1
        self.text += text[:position]
        events, self._events = merge(self._events), []
        return events, text[position:]

    def _takes_mark(self, character: str) -> bool:
        """Whether the character, outside keys and values, is one of the object's."""
        if character in _WHITESPACE:
            return True
        match self._awaits, character:
            case "{", "{":
                self._awaits = "key or }"
            case "key or }" | "key after ,", '"':
                self._begin_value("key")
                return False
            case "key or }" | ", or }", "}":
                self._end()
            case ", or }", ",":
                self._awaits = "key after ,"
            case ":", ":":
                self._awaits = "first of value"
            case "first of value", _ if character in _FIRST_OF_VALUE:
                self._is_telling = self._key in _ARGUMENT_KEYS and character == "{" and self._begins()
                if not self.is_malformed:
                    self._begin_value("value")
                return False
            case _:
                self._fail()
                return False
        return not self.is_malformed

    def _begin_value(self, awaits: str) -> None:
        self._awaits, self._value, self._value_text = awaits, ValueReader(), ""

    def _take_value(self, piece: str, is_whole: bool) -> None:
        self._value_text += piece
        if self._is_telling:
            self._events.append(ArgumentsPiece(piece))
        if is_whole and self._awaits == "key":
            self._key, self._awaits = _string(self._value_text) or "", ":"
        elif is_whole:
            self._is_telling = False
            self._take_member()

    def _take_member(self) -> None:
        self._awaits = ", or }"
        if self._key == "name":
            if self.has_begun:
                return
            self._name = _string(self._value_text)
            if self._name is None:
                self._fail()
        elif self._key in _ARGUMENT_KEYS and not self.has_begun:
            self._arguments = _arguments(self._value_text)
            if self._arguments is None:
                self._fail()

    def _begins(self) -> bool:
        """Begins the call here, if its name is known and it has not begun yet."""
        if self.has_begun or self._name is None:
            return False
        if not self._name or (self._known_names is not None and self._name not in self._known_names):
            self._fail()
            return False
        self.has_begun = True
        self._events.append(CallBegin(self._name))
        return True

    def _end(self) -> None:
        self.is_over = True
        if self._begins():
            self._events.append(ArgumentsPiece(self._arguments or "{}"))
        self.is_malformed |= not self.has_begun

    def _fail(self) -> None:
        self.is_over = self.is_malformed = True


def _string(text: str) -> str | None:
    """The value of a JSON string; None: it is none."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _arguments(text: str) -> str | None:
    """Arguments that are an object, or an object written as a string; none at all is an empty one."""
    if text.startswith("{"):
        return text
    return "{}" if text == "null" else _string(text)
